"""A schedule as plain numbers, and what single operations take of them."""

from __future__ import annotations

import numpy as np
import pytest

from moe_worker.engine.batch import build_batch
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.schedule import Schedule, ScheduledSequence
from moe_worker.engine.sequence import Sequence

BLOCK = 4


def a_sequence(name: str, prompt: range, table: list[int], **wishes: int) -> Sequence:
    seq = Sequence(name, tuple(prompt), SamplingParams(max_tokens=5, **wishes))
    seq.block_table = table
    return seq


def test_sequences_lie_one_after_another() -> None:
    decoding = a_sequence("a", range(10, 15), [7, 2])
    decoding.output = [90]
    piece = a_sequence("b", range(20, 30), [1, 0, 5], prompt_logprobs=1)
    end = a_sequence("c", range(30, 33), [3])
    batch = build_batch(
        Schedule(
            (
                ScheduledSequence(decoding, 5, 1, True),
                ScheduledSequence(piece, 3, 2, False),
                ScheduledSequence(end, 0, 3, True),
            )
        ),
        BLOCK,
    )
    assert batch.ids.tolist() == [90, 23, 24, 30, 31, 32]
    assert batch.spans_SC.tolist() == [[5, 1, 2], [3, 2, 3], [0, 3, 1]]
    assert batch.blocks.tolist() == [7, 2, 1, 0, 5, 3]
    assert batch.sample_rows.tolist() == [0, 1, 2, 5]
    positions_T, slots_T = batch.places()
    assert positions_T.tolist() == [5, 3, 4, 0, 1, 2]
    assert slots_T.tolist() == [2 * BLOCK + 1, 1 * BLOCK + 3, 0, *range(3 * BLOCK, 3 * BLOCK + 3)]
    assert [row.blocks for row in batch.plan.rows] == [[7, 2], [1, 0, 5], [3]]
    assert [(row.start, row.num_tokens) for row in batch.plan.rows] == [(5, 1), (3, 2), (0, 3)]


def test_an_empty_schedule_has_no_tokens() -> None:
    batch = build_batch(Schedule(), BLOCK)
    assert batch.num_tokens == 0
    assert batch.spans_SC.shape == (0, 3)
    assert [places.tolist() for places in batch.places()] == [[], []]
    assert batch.plan.rows == ()


def test_a_table_that_ends_before_the_tokens_is_refused() -> None:
    entry = ScheduledSequence(a_sequence("a", range(9), [1, 2]), 0, 9, True)
    with pytest.raises(IndexError, match="2 blocks do not reach 9 keys"):
        build_batch(Schedule((entry,)), BLOCK).places()


def test_numbers_are_whole_in_any_step() -> None:
    """Kernels are compiled by the types of their arguments."""
    batch = build_batch(Schedule(), BLOCK)
    arrays = (batch.ids, batch.spans_SC, batch.blocks, batch.sample_rows)
    assert {array.dtype for array in arrays} == {np.dtype(np.int64)}
