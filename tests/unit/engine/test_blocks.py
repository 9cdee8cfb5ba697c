"""The pool of KV blocks as a state machine: nothing is lost, doubled or freed too early."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moe_worker.engine.blocks import BlockPool, OutOfBlocks

NUM_BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Tables of owners beside the pool; the pool must always agree with them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def take(self, count: int) -> None:
        free_before = self.pool.num_free
        if count > free_before:
            with pytest.raises(OutOfBlocks, match=f"{count} KV blocks asked for, {free_before}"):
                self.pool.take(count)
            assert self.pool.num_free == free_before
        else:
            self.tables.append(self.pool.take(count))

    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            prefix = table[: data.draw(st.integers(0, len(table)))]
            self.pool.share(prefix)
            self.tables.append(list(prefix))

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            index = data.draw(st.integers(0, len(self.tables) - 1))
            self.pool.release(self.tables.pop(index))

    @invariant()
    def pool_agrees_with_the_tables(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_free + self.pool.num_used == NUM_BLOCKS


Blocks.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestBlocks = Blocks.TestCase


def test_blocks_are_handed_out_in_order() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert first == [0, 1, 2]
    pool.release(reversed(first))
    assert pool.take(4) == [0, 1, 2, 3]


def test_releasing_twice_or_sharing_a_free_block_is_seen() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more than it is held"):
        pool.release(taken)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(taken)


def test_integrity_sees_a_leak_and_a_stranger() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    with pytest.raises(AssertionError, match="0 owners, count 1"):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([taken, [1]])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)
