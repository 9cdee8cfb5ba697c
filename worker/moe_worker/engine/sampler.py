"""Draw the next tokens of a step: what each request wants, beside the model's logits.

Each row is worked on alone, so a token depends on nothing that shares its batch. Probabilities are
those that the token was chosen by, before temperature and the cuts of top_k, top_p and min_p.
Neighbours: `moe_kernels.sampling` is the arithmetic; `runner` calls this once per step.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels import sampling
from moe_kernels.sampling import Cut, Row
from moe_worker.engine.events import TokenLogprobs
from moe_worker.engine.logit_rows import LogitRow
from moe_worker.engine.sampling_params import GrammarFailed
from moe_worker.engine.sequence import Sequence


class Undrawable(Exception):
    """No token can be chosen for some requests; `reasons` says why, by request id."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.reasons = reasons


@dataclass(frozen=True)
class Draws:
    """What a step gave its requests, by request id."""

    tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    """Of consecutive prompt tokens, where asked for."""


def draw(logits_BV: Tensor, rows: Rows[LogitRow]) -> Draws:
    """Tokens of the rows that draw, and the probabilities that were asked for.

    Raises:
        Undrawable: logits are not finite, a grammar failed, or everything is forbidden.
    """
    draws, reasons = Draws(), {}
    drawing: list[Sequence] = []
    chosen_from: list[Row] = []
    for row, logits_V in zip(rows, sampling.as_rows(logits_BV), strict=True):
        seq = row.seq
        try:
            if row.draws:
                chosen_from.append(_checked(_adjusted(_checked(logits_V), seq)))
                drawing.append(seq)
            else:
                told = draws.prompt_logprobs.setdefault(seq.request_id, [])
                told.append(_judged(_checked(logits_V), seq, row.position + 1))
        except (sampling.NonFiniteLogits, GrammarFailed) as error:
            reasons[seq.request_id] = str(error)
    if reasons:
        raise Undrawable(reasons)
    if drawing:
        _draw(chosen_from, drawing, draws)
    return draws


def _draw(chosen_from: list[Row], drawing: list[Sequence], draws: Draws) -> None:
    tokens = sampling.sample(
        torch.from_numpy(sampling.stacked(chosen_from)),
        [_cut(seq) for seq in drawing],
        [seq.params.seed for seq in drawing],
        [seq.num_tokens for seq in drawing],
    )
    for seq, logits_V, token in zip(drawing, chosen_from, tokens.tolist(), strict=True):
        draws.tokens[seq.request_id] = token
        if seq.params.num_logprobs is not None:
            told = _logprobs(logits_V, token, seq.params.num_logprobs)
            draws.logprobs[seq.request_id] = told


def _adjusted(logits_V: Row, seq: Sequence) -> Row:
    """Penalties, then biases, then what the grammar allows; the row itself when none is wanted."""
    params = seq.params
    if params.has_penalties:
        logits_V = sampling.penalise(
            logits_V,
            seq.prompt,
            seq.output,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            repetition=params.repetition_penalty,
        )
    if params.logit_bias:
        logits_V = sampling.bias(logits_V, params.logit_bias)
    if params.grammar is not None:
        logits_V = sampling.restrict(logits_V, params.grammar.allowed(seq.output))
    return logits_V


def _checked(logits_V: Row) -> Row:
    if sampling.unusable_rows(logits_V[None]):
        raise sampling.NonFiniteLogits(
            "its logits are not finite, or its biases and its format forbid every token"
        )
    return logits_V


def _judged(logits_V: Row, seq: Sequence, position: int) -> TokenLogprobs:
    count = seq.params.prompt_logprobs
    assert count is not None, "such rows exist for those who asked"
    return _logprobs(logits_V, seq.prompt[position], count)


def _logprobs(logits_V: Row, token: int, count: int) -> TokenLogprobs:
    logprobs_V = sampling.log_probabilities(logits_V)
    best = sampling.most_probable(logprobs_V, count)
    alternatives = tuple((other, float(logprobs_V[other])) for other in best)
    return TokenLogprobs(token, float(logprobs_V[token]), alternatives)


def _cut(seq: Sequence) -> Cut:
    params = seq.params
    return Cut(params.temperature, params.top_k, params.top_p, params.min_p)
