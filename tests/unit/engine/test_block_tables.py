"""Sequences on the prefix cache: whatever is shared, copied, evicted and recomputed, each reads
only what was computed from its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from moe_worker.engine.block_tables import BlockTables, Start
from moe_worker.engine.blocks import BlockPool, OutOfBlocks
from moe_worker.engine.events import TokenLogprobs
from moe_worker.engine.prefix_index import Digest, PrefixIndex, chain_digest, pack
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence

NUM_BLOCKS = 6
BLOCK_SIZE = 2
PARAMS = SamplingParams(max_tokens=100)
JUDGED = SamplingParams(max_tokens=100, prompt_logprobs=0)


def colliding_digest(parent: bytes, tokens: bytes) -> bytes:
    """So weak that most contents share one with another content."""
    return bytes([(sum(parent) + sum(tokens)) % 3])


class Tables(RuleBasedStateMachine):
    """Sequences over two token ids, so that they begin alike all the time. `places` stands for the
    bytes: what each place of each block was computed from, and for whom."""

    digest: ClassVar[Digest] = chain_digest

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, PrefixIndex(type(self).digest))
        self.tables = BlockTables(self.pool, BLOCK_SIZE, prefix_caching=True)
        self.seqs: list[Sequence] = []
        self.waiting = Sequence("waiting", (0,) * 8, PARAMS)
        self.places: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        num_judged=st.none() | st.integers(0, 9),
        salt=st.sampled_from(["", "", "a"]),
        data=st.data(),
    )
    def begin(
        self, prompt: list[int], num_judged: int | None, salt: str, data: st.DataObject
    ) -> None:
        """`num_judged`: tokens whose probabilities are known, of a prompt that wants them all."""
        seq = Sequence(f"s{len(self.seqs)}", tuple(prompt), PARAMS)
        if num_judged is not None and num_judged < len(prompt) - 1:
            seq.params = JUDGED
        seq.params = replace(seq.params, cache_salt=salt)
        if seq.params.prompt_logprobs is not None:
            seq.prompt_logprobs = [TokenLogprobs(0, 0.0)] * num_judged
        starts = self.tables.starts(seq)
        cached = [start.num_cached_tokens for start in starts]
        assert cached == sorted(cached, reverse=True)
        start = data.draw(st.sampled_from(starts))
        available, taken = self.pool.num_available, self.tables.num_taken(start)
        if taken > available:
            with pytest.raises(OutOfBlocks):
                self.tables.begin(seq, start)
            assert self.pool.num_available == available
            assert not seq.block_table
            return
        self.tables.begin(seq, start)
        assert self.pool.num_available == available - taken
        assert seq.num_computed <= seq.first_wanted, "logits that are wanted are never computed"
        if start.copied is not None:
            for offset in range(BLOCK_SIZE):
                source = self.places[start.copied.block, offset]
                self.places[seq.block_table[len(start.known)], offset] = source
        self.seqs.append(seq)

    @rule(count=st.integers(1, 4), token=st.integers(0, 1), data=st.data())
    @precondition(lambda self: self.seqs)
    def step(self, count: int, token: int, data: st.DataObject) -> None:
        """Compute some tokens; the last of them draws one more, which may need a block."""
        seq = data.draw(st.sampled_from(self.seqs))
        if self.tables.num_missing(seq) > self.pool.num_available:
            with pytest.raises(OutOfBlocks):
                self.tables.grow(seq)
            return
        self.tables.grow(seq)
        end = min(seq.num_tokens, seq.num_computed + count)
        known = tuple(seq.tokens(0, end))
        for at in range(seq.num_computed, end):
            block = seq.block_table[at // BLOCK_SIZE]
            assert not self.pool.prefixes.holds(block), "a known block changes"
            others = [other for other in self.seqs if other is not seq]
            assert not any(block in other.block_table for other in others), "a shared block changes"
            self.places[block, at % BLOCK_SIZE] = (seq.params.cache_salt, known[: at + 1])
        seq.num_computed = end
        self.tables.record(seq)
        if end == seq.num_tokens:
            seq.output.append(token)

    @rule(data=st.data())
    @precondition(lambda self: self.seqs)
    def release(self, data: st.DataObject) -> None:
        """Finished, aborted or preempted, in whatever state."""
        seq = self.seqs.pop(data.draw(st.integers(0, len(self.seqs) - 1)))
        self.tables.release(seq)
        assert (seq.block_table, seq.copied_from, seq.prefix, seq.num_computed) == (
            [], None, None, 0,
        )  # fmt: skip

    @rule()
    def forget(self) -> None:
        self.pool.forget()

    @invariant()
    def who_waits_is_told_what_a_fresh_look_finds(self) -> None:
        fresh = BlockTables(self.pool, BLOCK_SIZE, prefix_caching=True)
        assert self.tables.starts(self.waiting) == fresh.starts(self.waiting)

    @invariant()
    def everybody_reads_what_was_computed_from_his_own_tokens(self) -> None:
        for seq in self.seqs:
            known = tuple(seq.tokens(0, seq.num_computed))
            for at in range(seq.num_computed):
                place = seq.block_table[at // BLOCK_SIZE], at % BLOCK_SIZE
                assert self.places[place] == (seq.params.cache_salt, known[: at + 1])

    @invariant()
    def pool_agrees_with_the_sequences(self) -> None:
        self.tables.check_integrity(self.seqs)
        pool = self.pool
        assert pool.num_free + pool.num_used + pool.num_cached == NUM_BLOCKS

    def teardown(self) -> None:
        for seq in self.seqs:
            self.tables.release(seq)
        assert self.pool.num_used == 0


class CollidingTables(Tables):
    digest = colliding_digest


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
CollidingTables.TestCase.settings = Tables.TestCase.settings
TestTables = Tables.TestCase
TestCollidingTables = CollidingTables.TestCase


def make(num_blocks: int = NUM_BLOCKS, prefix_caching: bool = True) -> BlockTables:
    return BlockTables(BlockPool(num_blocks), BLOCK_SIZE, prefix_caching)


def run(
    tables: BlockTables, prompt: tuple[int, ...], start: int = 0, salt: str = ""
) -> tuple[Sequence, Start]:
    """A sequence whose prompt is computed, by the start of that number."""
    seq = Sequence("r", prompt, replace(PARAMS, cache_salt=salt))
    chosen = tables.starts(seq)[start]
    tables.begin(seq, chosen)
    seq.num_computed = seq.num_tokens
    tables.record(seq)
    return seq, chosen


def test_a_prefix_is_shared_and_only_the_rest_is_computed() -> None:
    tables = make()
    first, _ = run(tables, (1, 2, 3, 4, 5))
    second, start = run(tables, (1, 2, 3, 4, 6))
    assert start.num_cached_tokens == 4
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]


def test_a_full_hit_leaves_the_last_token_and_writes_into_a_copy() -> None:
    tables = make()
    first, _ = run(tables, (1, 2, 3, 4))
    second = Sequence("r", (1, 2, 3, 4), PARAMS)
    start = tables.starts(second)[0]
    assert start.num_cached_tokens == 3
    tables.begin(second, start)
    assert second.copied_from == first.block_table[1]
    assert second.block_table[1] != first.block_table[1]
    second.num_computed = 4
    tables.record(second)
    assert second.copied_from is None
    assert second.block_table == first.block_table, "equal blocks are held once"
    assert tables.pool.num_used == 2


def test_a_block_to_be_copied_is_not_handed_out_before_it_is_copied() -> None:
    tables = make(num_blocks=3)
    first, _ = run(tables, (1, 2, 3, 4))
    tables.release(first)
    second = Sequence("r", (1, 2, 3, 4), PARAMS)
    tables.begin(second, tables.starts(second)[0])
    with pytest.raises(OutOfBlocks):
        tables.pool.take(1)
    second.num_computed = 4
    tables.record(second)
    tables.pool.take(1)


def test_without_room_for_a_copy_the_last_block_is_computed() -> None:
    tables = make(num_blocks=2)
    first, _ = run(tables, (1, 2, 3, 4))
    tables.release(first)
    copy, compute = tables.starts(Sequence("r", (1, 2, 3, 4), PARAMS))
    assert tables.num_taken(copy) == 3
    assert tables.num_taken(compute) == 2
    second, _ = run(tables, (1, 2, 3, 4), start=1)
    assert sorted(second.block_table) == [0, 1]


def test_who_waits_is_not_looked_up_again_from_the_beginning() -> None:
    looked_up: list[bytes] = []

    def digest(parent: bytes, tokens: bytes) -> bytes:
        looked_up.append(tokens)
        return chain_digest(parent, tokens)

    tables = BlockTables(BlockPool(NUM_BLOCKS, PrefixIndex(digest)), BLOCK_SIZE, True)
    first, _ = run(tables, (1, 2, 3, 4, 5, 6))
    waiting = Sequence("waiting", (1, 2, 3, 4, 5, 6, 7, 8, 9, 10), PARAMS)
    found = tables.starts(waiting)
    looked_up.clear()
    assert tables.starts(waiting) == found
    assert looked_up == [pack([7, 8])], "only the first that was not known"
    tables.release(first)
    tables.pool.take(NUM_BLOCKS - 1)
    assert [len(start.known) for start in tables.starts(waiting)] == [1]


def test_two_that_compute_the_same_end_up_with_the_same_blocks() -> None:
    tables = make()
    seqs = [Sequence(name, (1, 2, 3, 4, 5), PARAMS) for name in "ab"]
    for seq in seqs:
        tables.begin(seq, tables.starts(seq)[0])
    assert tables.pool.num_used == 6
    for seq in seqs:
        seq.num_computed = 5
        tables.record(seq)
    assert seqs[0].block_table[:2] == seqs[1].block_table[:2]
    assert tables.pool.num_used == 4


def test_generated_tokens_are_found_again_too() -> None:
    tables = make()
    first, _ = run(tables, (1, 2, 3))
    first.output.append(4)
    tables.grow(first)
    first.num_computed = 4
    tables.record(first)
    tables.release(first)
    assert tables.starts(Sequence("r", (1, 2, 3, 4, 5), PARAMS))[0].num_cached_tokens == 4


def test_the_same_tokens_elsewhere_are_not_a_hit() -> None:
    tables = make()
    run(tables, (1, 2, 3, 4, 5))
    for other in ((3, 4, 1), (9, 2, 3, 4, 5), (1, 2, 1, 2, 5), (0, 1, 2, 3, 4)):
        hits = tables.starts(Sequence("r", other, PARAMS))[0].num_cached_tokens
        assert hits == (2 if other[:2] == (1, 2) else 0)


def test_a_prefix_is_shared_only_by_those_with_the_same_salt() -> None:
    tables = make(num_blocks=20)
    prompt = (1, 2, 3, 4, 5)
    run(tables, prompt, salt="a")
    hits = {salt: run(tables, prompt, salt=salt)[1].num_cached_tokens for salt in ("", "b", "a")}
    assert hits == {"": 0, "b": 0, "a": 4}
    # A salt that spells tokens is still none.
    _, start = run(tables, (7, 8, 9), salt=pack(prompt[:2]).decode())
    assert start.num_cached_tokens == 0


def test_a_prompt_that_is_to_be_judged_is_computed_as_far_as_it_is_not() -> None:
    tables = make(num_blocks=12)
    run(tables, (1, 2, 3, 4, 5, 6, 7))
    seq = Sequence("r", (1, 2, 3, 4, 5, 6, 7), JUDGED)
    assert tables.starts(seq)[0].num_cached_tokens == 0
    seq.prompt_logprobs = [TokenLogprobs(0, 0.0)] * 3
    copy, plain = tables.starts(seq)
    assert (copy.num_cached_tokens, plain.num_cached_tokens) == (3, 2)
    tables.begin(seq, copy)
    assert tables.copy_for(seq) == (seq.copied_from, seq.block_table[1])


def test_switched_off_nothing_is_found_or_kept() -> None:
    tables = make(prefix_caching=False)
    first, _ = run(tables, (1, 2, 3, 4))
    second, start = run(tables, (1, 2, 3, 4))
    assert start.num_cached_tokens == 0
    assert not set(first.block_table) & set(second.block_table)
    tables.release(first)
    tables.release(second)
    assert tables.pool.num_free == NUM_BLOCKS


def test_a_digest_that_is_taken_costs_a_miss_and_never_an_answer() -> None:
    pool = BlockPool(9, PrefixIndex(lambda parent, tokens: b"same"))
    tables = BlockTables(pool, BLOCK_SIZE, prefix_caching=True)
    first, _ = run(tables, (1, 2, 9))
    second, _ = run(tables, (3, 4, 9))
    assert pool.prefixes.find(None, pack((1, 2))) is first.prefix
    assert pool.prefixes.find(None, pack((3, 4))) is None
    assert second.prefix is None
    tables.check_integrity([first, second])
    tables.release(first)
    tables.release(second)
    assert (tables.pool.num_cached, tables.pool.num_free) == (1, 8)


def test_after_forgetting_a_running_sequence_makes_nothing_known() -> None:
    tables = make()
    seq, _ = run(tables, (1, 2, 3))
    tables.pool.forget()
    seq.output.append(4)
    tables.grow(seq)
    seq.num_computed = 4
    tables.record(seq)
    assert len(tables.pool.prefixes) == 0
    tables.release(seq)
    assert tables.pool.num_free == NUM_BLOCKS
