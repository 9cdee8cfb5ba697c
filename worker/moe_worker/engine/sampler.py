"""Draw the next tokens of a step: what each request wants, beside the model's logits.

Each row is worked on alone, so a token depends on nothing that shares its batch. Probabilities are
those that the token was chosen by, before temperature and the cuts of top_k, top_p and min_p.
Neighbours: `moe_kernels.sampling` is the arithmetic; `runner` calls this once per step.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels import sampling
from moe_kernels.sampling import Row
from moe_worker.engine.events import TokenLogprobs
from moe_worker.engine.logit_rows import LogitRow
from moe_worker.engine.sampling_params import GrammarFailed
from moe_worker.engine.sequence import Sequence

_UNUSABLE = "its logits are not finite, or its biases and its format forbid every token"


class Undrawable(Exception):
    """No token can be chosen for some requests; `reasons` says why, by request id."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {why}" for name, why in reasons.items()))
        self.reasons = reasons


@dataclass(slots=True)
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
    draws, reasons = Draws(), dict[str, str]()
    seqs = [row.seq for row in rows if row.draws]
    if len(seqs) < len(rows):
        judged = [index for index, row in enumerate(rows) if not row.draws]
        _judge(sampling.as_rows(logits_BV[judged]), [rows[i] for i in judged], draws, reasons)
        drawing = [index for index, row in enumerate(rows) if row.draws]
        logits_BV = logits_BV[drawing]
    tokens = _sample(logits_BV, seqs, reasons)
    special = False
    for seq, token in zip(seqs, tokens, strict=True):
        draws.tokens[seq.request_id] = token
        special = special or not seq.params.is_plain
    if special or reasons:
        _follow_wishes(logits_BV, seqs, draws, reasons)
    return draws


def _follow_wishes(
    logits_BV: Tensor, seqs: Rows[Sequence], draws: Draws, reasons: dict[str, str]
) -> None:
    """Tokens of those who want others than the model's, and probabilities.

    Raises:
        Undrawable: for the reasons given, and those found.
    """
    wishes = {i: seq for i, seq in enumerate(seqs) if seq.params.adjusts_logits}
    adjusted = _adjust(logits_BV, wishes, reasons) if wishes else {}
    if adjusted:
        # Drawn again from what they wish for: the rows of all others are not copied.
        wished_BV = torch.from_numpy(sampling.stacked(list(adjusted.values())))
        wishing = [seqs[index] for index in adjusted]
        tokens = _sample(wished_BV, wishing, reasons)
        draws.tokens.update(zip([seq.request_id for seq in wishing], tokens, strict=True))
    if reasons:
        raise Undrawable(reasons)
    for index, seq in enumerate(seqs):
        if seq.params.num_logprobs is not None:
            row = adjusted[index] if index in adjusted else sampling.as_rows(logits_BV[index])
            token = draws.tokens[seq.request_id]
            draws.logprobs[seq.request_id] = _logprobs(row, token, seq.params.num_logprobs)


def _sample(logits_BV: Tensor, seqs: Rows[Sequence], reasons: dict[str, str]) -> list[int]:
    """A token of each row; where one cannot be had, all are 0 and `reasons` says why."""
    if not seqs:
        return []
    params = [seq.params for seq in seqs]
    try:
        return sampling.sample(
            logits_BV,
            [each.cut for each in params],
            [each.seed for each in params],
            [seq.num_tokens for seq in seqs],
        )
    except sampling.NonFiniteLogits as error:
        reasons |= {seqs[row].request_id: _UNUSABLE for row in error.rows}
        return [0] * len(seqs)


def _adjust(
    logits_BV: Tensor, wishes: Mapping[int, Sequence], reasons: dict[str, str]
) -> dict[int, Row]:
    """The rows of those who wish for others than the model's."""
    adjusted = {}
    for index, seq in wishes.items():
        try:
            adjusted[index] = _adjusted(sampling.as_rows(logits_BV[index]), seq)
        except GrammarFailed as error:
            reasons[seq.request_id] = str(error)
    return adjusted


def _judge(logits_BV: Row, rows: Rows[LogitRow], draws: Draws, reasons: dict[str, str]) -> None:
    """Probabilities of prompt tokens."""
    reasons |= {rows[i].seq.request_id: _UNUSABLE for i in sampling.unusable_rows(logits_BV)}
    for row, logits_V in zip(rows, logits_BV, strict=True):
        if row.seq.request_id not in reasons:
            told = draws.prompt_logprobs.setdefault(row.seq.request_id, [])
            told.append(_judged(logits_V, row.seq, row.position + 1))


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


def _judged(logits_V: Row, seq: Sequence, position: int) -> TokenLogprobs:
    count = seq.params.prompt_logprobs
    assert count is not None, "such rows exist for those who asked"
    return _logprobs(logits_V, seq.prompt[position], count)


def _logprobs(logits_V: Row, token: int, count: int) -> TokenLogprobs:
    logprobs_V = sampling.log_probabilities(logits_V)
    best = sampling.most_probable(logprobs_V, count)
    alternatives = tuple((other, float(logprobs_V[other])) for other in best)
    return TokenLogprobs(token, float(logprobs_V[token]), alternatives)
