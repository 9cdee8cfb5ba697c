"""Draws of a step: what each request wants of its own row, probabilities, and faults that stay
with the one who has them."""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_worker.engine.logit_rows import LogitRow, logit_rows
from moe_worker.engine.sampler import Undrawable, draw
from moe_worker.engine.sampling_params import GrammarFailed, SamplingParams
from moe_worker.engine.schedule import Schedule, ScheduledSequence
from moe_worker.engine.sequence import Sequence

VOCABULARY = 12


class Only:
    """Allows what is in the set, whatever came before."""

    def __init__(self, *allowed: int) -> None:
        self.allowed_ids = allowed

    def allowed(self, output: Rows[int]) -> npt.NDArray[np.bool_]:
        mask = np.zeros(VOCABULARY, dtype=np.bool_)
        mask[list(self.allowed_ids)] = True
        return mask


class Broken:
    def allowed(self, output: Rows[int]) -> npt.NDArray[np.bool_]:
        raise GrammarFailed("too complex")


def sequence(name: str, prompt: Rows[int] = (1, 2, 3), **params: Any) -> Sequence:
    return Sequence(name, tuple(prompt), SamplingParams(max_tokens=8, **params))


def newest(seq: Sequence) -> LogitRow:
    return LogitRow(seq, seq.num_tokens - 1, draws=True)


def one(logits: list[float], **params: Any) -> int:
    padded = logits + [-20.0] * (VOCABULARY - len(logits))
    return draw(torch.tensor([padded]), [newest(sequence("a", **params))]).tokens["a"]


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(3))


def test_biases_penalties_and_grammars_change_the_choice() -> None:
    logits = [3.0, 2.0, 1.0, 0.0]
    assert one(logits) == 0
    assert one(logits, logit_bias={1: 1.5}) == 1
    assert one(logits, logit_bias={0: -100.0}) == 1
    assert one(logits, grammar=Only(2, 3)) == 2
    assert one(logits, grammar=Only(2, 3), logit_bias={2: -100.0}) == 3
    assert one([0, 5.0, 4.0, 3.0], repetition_penalty=2.0) == 1, "1, 2 and 3 are in the prompt"
    assert one([4.0, 5.0, 4.0, 3.0], repetition_penalty=2.0) == 0
    seq = sequence("a", presence_penalty=2.0)
    seq.output += [0]
    rows = torch.tensor([[3.0, 2.0, *[-9.0] * (VOCABULARY - 2)]])
    assert draw(rows, [newest(seq)]).tokens == {"a": 1}


def test_the_row_that_the_model_made_is_left_as_it_was() -> None:
    logits = random_logits(1)
    before = logits.clone()
    wishes = {"repetition_penalty": 2.0, "logit_bias": {0: -100.0}, "grammar": Only(1, 2)}
    draw(logits, [newest(sequence("a", **wishes))])
    assert torch.equal(logits, before)


def wishes(index: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_k": 5, "seed": 7},
        {"temperature": 0.7, "top_p": 0.8, "seed": 1, "num_logprobs": 3},
        {"temperature": 1.3, "min_p": 0.1, "repetition_penalty": 1.3, "seed": 2},
        {"frequency_penalty": 1.0, "presence_penalty": 0.5, "num_logprobs": 0},
        {"temperature": 1.0, "logit_bias": {3: 5.0, 4: -100.0}, "grammar": Only(3, 4, 5)},
    ]
    return kinds[index % len(kinds)]


@given(st.permutations(range(6)), st.integers(1, 6))
def test_what_a_request_gets_does_not_depend_on_its_batch(order: list[int], size: int) -> None:
    logits = random_logits(6)
    alone = [draw(logits[[i]], [newest(sequence(f"r{i}", **wishes(i)))]) for i in range(6)]
    picked = order[:size]
    together = draw(logits[picked], [newest(sequence(f"r{i}", **wishes(i))) for i in picked])
    for index in picked:
        name = f"r{index}"
        assert together.tokens[name] == alone[index].tokens[name]
        assert together.logprobs.get(name) == alone[index].logprobs.get(name)


def test_probabilities_are_told_to_those_who_ask() -> None:
    rows = [newest(sequence("a", num_logprobs=2)), newest(sequence("b"))]
    logits = torch.tensor([[1.0, 3.0, 2.0] + [-math.inf] * (VOCABULARY - 3)] * 2)
    draws = draw(logits, rows)
    assert draws.logprobs.keys() == {"a"}
    told = draws.logprobs["a"]
    total = math.log(math.exp(1) + math.exp(2) + math.exp(3))
    assert told.token_id == 1
    assert told.logprob == pytest.approx(3 - total)
    assert [token for token, _ in told.alternatives] == [1, 2]
    assert [value for _, value in told.alternatives] == pytest.approx([3 - total, 2 - total])


def test_e02_what_a_grammar_forbids_is_impossible_and_the_rest_certain() -> None:
    seq = sequence("a", num_logprobs=5, grammar=Only(7), temperature=1.0)
    told = draw(random_logits(1), [newest(seq)]).logprobs["a"]
    assert (told.token_id, told.logprob) == (7, 0.0)
    assert told.alternatives[0] == (7, 0.0)
    assert {value for _, value in told.alternatives[1:]} == {-math.inf}
    assert len(told.alternatives) == 5


def test_a_fault_ends_only_the_request_that_has_it() -> None:
    logits = random_logits(4)
    logits[1, 5] = math.nan
    rows = [
        newest(sequence("fine")),
        newest(sequence("nan")),
        newest(sequence("grammar", grammar=Broken())),
        newest(sequence("nothing", grammar=Only(2), logit_bias={2: -100.0})),
    ]
    with pytest.raises(Undrawable) as caught:
        draw(logits, rows)
    assert caught.value.reasons.keys() == {"nan", "grammar", "nothing"}
    assert caught.value.reasons["grammar"] == "too complex"


def test_a_step_without_draws_gives_nothing() -> None:
    assert draw(torch.empty(0, VOCABULARY), []).tokens == {}


def scheduled(seq: Sequence, start: int, count: int) -> Schedule:
    samples = start + count == seq.num_tokens
    return Schedule((ScheduledSequence(seq, start, count, samples),))


def test_prompt_tokens_are_judged_piece_by_piece_and_only_once() -> None:
    seq = sequence("a", prompt=(5, 6, 7, 8), prompt_logprobs=1, num_logprobs=1)
    logits = random_logits(4)
    rows = logit_rows(scheduled(seq, 0, 3))
    assert [(row.position, row.draws) for row in rows] == [(0, False), (1, False), (2, False)]
    told = draw(logits[:3], rows).prompt_logprobs["a"]
    assert [entry.token_id for entry in told] == [6, 7, 8]
    assert told[0].logprob == pytest.approx(float(logits[0].log_softmax(0)[6]), abs=1e-6)
    seq.prompt_logprobs += told
    assert [row.draws for row in logit_rows(scheduled(seq, 3, 1))] == [True]
    # Computed again after a preemption: nothing is told twice.
    assert [row.position for row in logit_rows(scheduled(seq, 0, 4))] == [3]


def test_without_asking_only_the_newest_token_is_judged() -> None:
    seq = sequence("a")
    assert logit_rows(scheduled(seq, 0, 2)) == []
    assert [row.position for row in logit_rows(scheduled(seq, 2, 1))] == [2]
