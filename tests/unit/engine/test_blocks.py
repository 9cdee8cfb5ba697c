"""The pool of KV blocks as a state machine: nothing is lost, doubled, freed too early or evicted
out of order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moe_worker.engine.blocks import BlockPool, OutOfBlocks
from moe_worker.engine.prefix_index import Prefix, pack

NUM_BLOCKS = 12


class Blocks(RuleBasedStateMachine):
    """Owners' tables, kept contents and the order of letting go beside the pool; the pool must
    always agree with them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.kept: dict[int, Prefix] = {}
        self.let_go: list[int] = []
        """Kept blocks without an owner, the one let go longest ago first."""
        self.num_contents = 0

    def owners(self, block: int) -> int:
        return Counter(block for table in self.tables for block in table)[block]

    @rule(count=st.integers(0, NUM_BLOCKS + 2))
    def take(self, count: int) -> None:
        free, available = self.pool.num_free, self.pool.num_available
        if count > available:
            with pytest.raises(OutOfBlocks, match=f"{count} KV blocks asked for, {available}"):
                self.pool.take(count)
            assert self.pool.num_available == available
            return
        taken = self.pool.take(count)
        assert not any(self.owners(block) for block in taken), "an owner's block is given away"
        num_evicted = max(0, count - free)
        evicted, self.let_go = self.let_go[:num_evicted], self.let_go[num_evicted:]
        assert [block for block in taken if block in self.kept] == evicted
        for block in evicted:
            del self.kept[block]
        self.tables.append(taken)

    @rule(data=st.data())
    def share_a_prefix(self, data: st.DataObject) -> None:
        if self.tables:
            table = data.draw(st.sampled_from(self.tables))
            prefix = table[: data.draw(st.integers(0, len(table)))]
            self.pool.share(prefix)
            self.tables.append(list(prefix))

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """A block becomes known, after the kept blocks before it in its table."""
        tables = [table for table in self.tables if any(b not in self.kept for b in table)]
        if not tables:
            return
        table = data.draw(st.sampled_from(tables))
        at = next(at for at, block in enumerate(table) if block not in self.kept)
        self.num_contents += 1
        parent = self.kept[table[at - 1]] if at else None
        prefix = self.pool.keep(parent, pack([self.num_contents]), table[at])
        assert prefix is not None
        self.kept[table[at]] = prefix

    @rule(data=st.data())
    def share_what_is_cached(self, data: st.DataObject) -> None:
        if not self.let_go:
            return
        chain: list[int] = []
        prefix: Prefix | None = self.kept[data.draw(st.sampled_from(self.let_go))]
        while prefix is not None:
            assert self.pool.prefixes.find(prefix.parent, prefix.tokens) is prefix
            chain.insert(0, prefix.block)
            prefix = prefix.parent
        self.pool.share(chain)
        self.let_go = [block for block in self.let_go if block not in chain]
        self.tables.append(chain)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            self.pool.release(reversed(table))
            self.let_go += [b for b in reversed(table) if b in self.kept and not self.owners(b)]

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        self.kept.clear()
        self.let_go.clear()

    @invariant()
    def pool_agrees_with_the_tables(self) -> None:
        self.pool.check_integrity(self.tables)
        held = {block for table in self.tables for block in table}
        assert self.pool.num_used == len(held)
        assert self.pool.num_cached == len(self.let_go)
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == NUM_BLOCKS
        assert len(self.pool.prefixes) == len(self.kept)


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBlocks = Blocks.TestCase


def test_blocks_are_handed_out_in_order() -> None:
    pool = BlockPool(4)
    first = pool.take(3)
    assert first == [0, 1, 2]
    pool.release(reversed(first))
    assert pool.take(4) == [0, 1, 2, 3]


def test_what_was_let_go_longest_ago_is_evicted_first_and_only_without_free_blocks() -> None:
    pool = BlockPool(4)
    taken = pool.take(3)
    for number, block in enumerate(taken):
        pool.keep(None, pack([number]), block)
    pool.release([taken[1]])
    pool.release([taken[0], taken[2]])
    pool.share([taken[1]])
    pool.release([taken[1]])
    assert pool.take(1) == [3], "a free block comes first"
    assert [pool.take(1)[0] for _ in range(3)] == [taken[0], taken[2], taken[1]]
    assert len(pool.prefixes) == 0


def test_releasing_twice_or_sharing_a_free_block_is_seen() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="released more than it is held"):
        pool.release(taken)
    with pytest.raises(AssertionError, match="is free and cannot be shared"):
        pool.share(taken)
    with pytest.raises(AssertionError, match="is not in use and cannot be kept"):
        pool.keep(None, b"", taken[0])


def test_integrity_sees_a_leak_and_a_stranger() -> None:
    pool = BlockPool(2)
    taken = pool.take(1)
    with pytest.raises(AssertionError, match="0 owners, count 1"):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([taken, [1]])


def test_integrity_sees_a_block_that_outlives_its_prefix() -> None:
    pool = BlockPool(2)
    taken = pool.take(2)
    parent = pool.keep(None, b"a", taken[0])
    pool.keep(parent, b"b", taken[1])
    pool.prefixes.drop(taken[0])
    with pytest.raises(AssertionError, match="block 1 outlives its prefix"):
        pool.check_integrity([taken])


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 block, got 0"):
        BlockPool(0)
