"""The scheduler as a state machine, and its promises one by one. No torch, no model: a token is a
pure function of the tokens before it, so whoever is computed wrongly gets another text."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.schedule import Schedule
from moe_worker.engine.scheduler import (
    QueueFull,
    RequestTooLong,
    Scheduler,
    SchedulerLimits,
)
from moe_worker.engine.sequence import Sequence

STOP = 0


def make(
    *,
    num_blocks: int = 16,
    block_size: int = 4,
    max_running: int = 4,
    max_batched_tokens: int = 8,
    max_queued: int = 6,
    max_model_len: int = 40,
    prefix_caching: bool = True,
) -> Scheduler:
    limits = SchedulerLimits(
        max_running=max_running,
        max_batched_tokens=max_batched_tokens,
        max_queued=max_queued,
        max_model_len=max_model_len,
        block_size=block_size,
        prefix_caching=prefix_caching,
    )
    return Scheduler(limits, BlockPool(num_blocks))


def seq(
    name: str, prompt: int = 3, max_tokens: int = 4, stop: int | None = None, text: int = 0
) -> Sequence:
    """Prompts of the same text begin alike, prompts of different texts have no token in common."""
    stops = frozenset() if stop is None else frozenset((stop,))
    ids = tuple(range(1000 * text + 1, 1000 * text + prompt + 1))
    return Sequence(name, ids, SamplingParams(max_tokens=max_tokens, stop_token_ids=stops))


def next_token(tokens: list[int]) -> int:
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=4).digest()
    return int.from_bytes(digest) % 50


def expected_text(prompt: tuple[int, ...], params: SamplingParams) -> list[int]:
    output: list[int] = []
    while len(output) < params.max_tokens:
        token = next_token([*prompt, *output])
        if token in params.stop_token_ids:
            break
        output.append(token)
    return output


class FakeKv:
    """What each place of the cache was computed from, to see a token that is computed from other
    tokens than its own, or a block that is written although others may read it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.places: dict[tuple[int, int], tuple[int, ...]] = {}

    def run(self, schedule: Schedule) -> dict[str, int]:
        size = self.scheduler.limits.block_size
        written = [
            entry.seq.block_table[at // size]
            for entry in schedule.entries
            for at in sorted({at // size * size for at in range(entry.start, entry.end)})
        ]
        assert len(set(written)) == len(written), "two sequences write into a block"
        assert not any(map(self.scheduler.blocks.prefixes.holds, written)), "a known block changes"
        for source, target in schedule.copies:
            assert target in written
            for offset in range(size):
                self.places[target, offset] = self.places[source, offset]
        for entry in schedule.entries:
            known = tuple(entry.seq.tokens(0, entry.end))
            for at in range(entry.start, entry.end):
                self.places[entry.seq.block_table[at // size], at % size] = known[: at + 1]
        tokens: dict[str, int] = {}
        for entry in schedule.entries:
            table, known = entry.seq.block_table, tuple(entry.seq.tokens(0, entry.end))
            for at in range(entry.end):
                assert self.places.get((table[at // size], at % size)) == known[: at + 1]
            if entry.samples:
                assert entry.end == entry.seq.num_tokens
                tokens[entry.seq.request_id] = next_token(list(known))
        return tokens


def run_to_end(scheduler: Scheduler, kv: FakeKv | None = None) -> dict[str, Sequence]:
    kv = kv or FakeKv(scheduler)
    finished: dict[str, Sequence] = {}
    for _ in range(2000):
        schedule = scheduler.schedule()
        if not schedule.entries:
            break
        assert schedule.num_tokens <= scheduler.limits.max_batched_tokens
        for done in scheduler.commit(schedule, kv.run(schedule)):
            finished[done.request_id] = done
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert scheduler.blocks.num_used == 0
    return finished


class Scheduling(RuleBasedStateMachine):
    """Arrivals, aborts, steps and failed steps in any order, with far too few blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = make(num_blocks=10)
        self.kv = FakeKv(self.scheduler)
        self.alive: dict[str, Sequence] = {}
        self.count = 0

    @rule(prompt=st.integers(1, 20), max_tokens=st.integers(1, 20), text=st.integers(0, 2))
    def add(self, prompt: int, max_tokens: int, text: int) -> None:
        self.count += 1
        new = seq(f"r{self.count}", prompt, max_tokens, stop=STOP, text=text)
        if self.scheduler.is_full:
            with pytest.raises(QueueFull):
                self.scheduler.add(new)
        else:
            self.scheduler.add(new)
            self.alive[new.request_id] = new

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            name = data.draw(st.sampled_from(sorted(self.alive)))
            assert self.scheduler.abort(name)
            assert not self.scheduler.abort(name)
            del self.alive[name]

    @rule(aborts=st.booleans())
    def step(self, aborts: bool) -> None:
        schedule = self.scheduler.schedule()
        tokens = self.kv.run(schedule)
        if aborts and schedule.entries:  # a client leaves while its step runs
            name = schedule.entries[-1].seq.request_id
            self.scheduler.abort(name)
            del self.alive[name]
        for done in self.scheduler.commit(schedule, tokens):
            assert done.output == expected_text(done.prompt, done.params)
            del self.alive[done.request_id]

    @rule()
    def failed_step(self) -> None:
        first = self.scheduler.schedule()
        self.kv.run(first)
        if not self.scheduler.is_full:
            self.add(prompt=1, max_tokens=1, text=3)  # who comes meanwhile waits for the next step
        if first.entries:
            assert self.scheduler.schedule() == first

    @invariant()
    def nothing_is_lost(self) -> None:
        self.scheduler.check_integrity()
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)
        assert self.scheduler.num_running <= self.scheduler.limits.max_running
        if self.alive:
            assert self.scheduler.schedule().entries, "there is work but none is scheduled"

    def teardown(self) -> None:
        finished = run_to_end(self.scheduler, self.kv)
        for name, done in finished.items():
            assert done.output == expected_text(self.alive[name].prompt, done.params)
        assert finished.keys() == self.alive.keys()


Scheduling.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestScheduling = Scheduling.TestCase


@pytest.mark.parametrize("num_blocks", [10, 11, 14, 64])
@pytest.mark.parametrize("max_batched_tokens", [4, 5, 64])
def test_any_pool_and_budget_give_the_same_texts(num_blocks: int, max_batched_tokens: int) -> None:
    scheduler = make(num_blocks=num_blocks, max_batched_tokens=max_batched_tokens, max_queued=20)
    requests = [seq(f"r{i}", 3 + 5 * i % 17, 10 + i, text=i) for i in range(12)]
    for request in requests:
        scheduler.add(request)
    finished = run_to_end(scheduler)
    assert len(finished) == 12
    for request in requests:
        assert request.output == expected_text(request.prompt, request.params)
    if num_blocks == 10:
        assert scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("num_blocks", "max_batched_tokens", "prompt", "max_tokens"),
    [(20, 12, 4, 26), (20, 9, 8, 26), (12, 20, 6, 18), (24, 64, 8, 24)],
)
def test_d06_a_full_pool_neither_stalls_nor_thrashes(
    num_blocks: int, max_batched_tokens: int, prompt: int, max_tokens: int
) -> None:
    """8 running sequences, each about to need a block, none free. With a small budget a preempted
    one needs many steps to come back, in which the others go on growing."""
    scheduler = make(
        num_blocks=num_blocks, max_running=8, max_batched_tokens=max_batched_tokens, max_queued=8
    )
    requests = [seq(f"r{i}", prompt, max_tokens, text=i) for i in range(8)]
    for request in requests:
        scheduler.add(request)
    kv = FakeKv(scheduler)
    progress_at_preemption: dict[str, int] = {}
    finished = 0
    for _ in range(1000):
        if not scheduler.has_work:
            break
        running = {s.request_id for s in requests if s.block_table}
        schedule = scheduler.schedule()
        assert schedule.entries, "no request advances"
        for request in requests:
            if request.request_id in running and not request.block_table:
                before = progress_at_preemption.get(request.request_id, -1)
                assert len(request.output) > before, "preempted twice without progress"
                progress_at_preemption[request.request_id] = len(request.output)
                began = {entry.seq.request_id for entry in schedule.entries} - running
                assert not began, "freed blocks went to a newcomer"
        finished += len(scheduler.commit(schedule, kv.run(schedule)))
        scheduler.check_integrity()
    assert finished == 8
    assert progress_at_preemption, "the pool was meant to be too small"
    assert all(r.output == expected_text(r.prompt, r.params) for r in requests)


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    scheduler = make(num_blocks=32, max_batched_tokens=4, max_model_len=100)
    short, long = seq("short", 2, 20), seq("long", 60, 2)
    kv = FakeKv(scheduler)
    scheduler.add(short)
    scheduler.commit(first := scheduler.schedule(), kv.run(first))
    scheduler.add(long)
    for step in range(1, 12):
        schedule = scheduler.schedule()
        sizes = {entry.seq.request_id: entry.num_tokens for entry in schedule.entries}
        assert sizes == {"short": 1, "long": 3}
        scheduler.commit(schedule, kv.run(schedule))
        assert len(short.output) == 1 + step


def test_the_queue_is_never_jumped() -> None:
    """A small request behind a large one that does not fit yet waits its turn."""
    scheduler = make(num_blocks=10, max_batched_tokens=64)
    for text, (name, prompt) in enumerate((("first", 30), ("large", 20), ("small", 1))):
        scheduler.add(seq(name, prompt, 2, text=text))
    kv = FakeKv(scheduler)
    schedule = scheduler.schedule()
    assert [entry.seq.request_id for entry in schedule.entries] == ["first"]
    order = []
    while scheduler.has_work:
        schedule = scheduler.schedule()
        order += [e.seq.request_id for e in schedule.entries if e.start == 0]
        scheduler.commit(schedule, kv.run(schedule))
    assert order == ["first", "large", "small"]


def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    scheduler = make(max_running=1, max_queued=2)
    scheduler.add(seq("runs"))
    scheduler.schedule()
    scheduler.add(seq("a"))
    scheduler.add(seq("b"))
    with pytest.raises(QueueFull, match=r"2 requests are queued .*maxQueued") as refusal:
        scheduler.add(seq("c"))
    assert refusal.value.retry_after_seconds > 0
    assert scheduler.num_waiting == 2


def test_e09_who_comes_at_once_finds_the_places_to_run_and_the_queue() -> None:
    scheduler = make(max_running=2, max_queued=4)
    taken = 0
    for number in range(10):
        with contextlib.suppress(QueueFull):
            scheduler.add(seq(f"r{number}"))
            taken += 1
    assert taken == 6


def test_a_request_that_never_fits_is_refused_at_once() -> None:
    with pytest.raises(RequestTooLong, match="30 tokens and max_tokens 11 exceed 40"):
        make().add(seq("long", 30, 11))
    with pytest.raises(RequestTooLong, match="exceed 12"):
        make(num_blocks=3).add(seq("large", 10, 3))


@pytest.mark.parametrize("steps", range(8))
@pytest.mark.parametrize("num_texts", [1, 6])
def test_d01_abort_after_any_number_of_steps_frees_everything(steps: int, num_texts: int) -> None:
    """All at once, while a step is under way, with prompts alike and not: the pool is as before."""
    scheduler = make(num_blocks=10, max_batched_tokens=5, max_queued=20)
    kv = FakeKv(scheduler)
    for round_ in range(25):
        names = [f"{round_}-{i}" for i in range(6)]
        for i, name in enumerate(names):
            scheduler.add(seq(name, 9, 9, text=i % num_texts))
        for _ in range(steps):
            schedule = scheduler.schedule()
            scheduler.commit(schedule, kv.run(schedule))
        schedule = scheduler.schedule()
        tokens = kv.run(schedule)
        for name in names:
            scheduler.abort(name)
        assert scheduler.commit(schedule, tokens) == []
        scheduler.check_integrity()
        assert scheduler.blocks.num_used == 0
        assert not scheduler.has_work


def is_queued(request: Sequence) -> bool:
    return request.num_starts == 0


def is_in_its_second_piece(request: Sequence) -> bool:
    """Of four: a prompt of 16 tokens in pieces of 4."""
    return 4 <= request.num_computed < 8


def is_decoding(request: Sequence) -> bool:
    return len(request.output) >= 2 and bool(request.block_table)


def is_preempted(request: Sequence) -> bool:
    return request.num_starts > 0 and not request.block_table


@pytest.mark.parametrize("state", [is_queued, is_in_its_second_piece, is_decoding, is_preempted])
def test_d01_two_hundred_aborts_in_one_state_leak_nothing(
    state: Callable[[Sequence], bool],
) -> None:
    """Also of a request whose step waits for a reply that never comes: half of the aborts fall
    between a schedule and its commit, and half of those schedules are never committed."""
    scheduler = make(num_blocks=14, max_batched_tokens=4, max_queued=20, max_model_len=48)
    kv = FakeKv(scheduler)
    known: dict[str, Sequence] = {}
    num_aborted = 0
    for number in range(10_000):
        if num_aborted == 200:
            break
        while scheduler.num_waiting < 4:
            name = f"{number}-{scheduler.num_waiting}-{scheduler.num_running}"
            added = seq(name, 16, 24, text=number % 7)
            scheduler.add(added)
            known[name] = added
        schedule = scheduler.schedule()
        tokens = kv.run(schedule)
        aborted = next((r for r in known.values() if state(r)), None)
        if aborted is not None and number % 2:
            del known[aborted.request_id]
            assert scheduler.abort(aborted.request_id)
            num_aborted += 1
            assert (aborted.block_table, aborted.copied_from) == ([], None)
            assert not any(entry.seq is aborted for entry in scheduler.schedule().entries)
            scheduler.check_integrity()
            if number % 4 == 1:
                continue
        for done in scheduler.commit(schedule, tokens):
            del known[done.request_id]
        scheduler.check_integrity()
    assert num_aborted == 200
    for name in list(known):
        scheduler.abort(name)
    scheduler.check_integrity()
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.num_available == 14


def test_d01_a_block_that_waits_to_be_copied_is_not_handed_out() -> None:
    """The step that copies it fails and is run again, while the pool is under pressure."""
    scheduler = make(num_blocks=8, max_batched_tokens=16)
    kv = FakeKv(scheduler)
    scheduler.add(seq("first", 8, 1))
    run_to_end(scheduler, kv)
    scheduler.add(seq("again", 8, 4))
    for other in range(1, 4):
        scheduler.add(seq(f"other-{other}", 16, 4, text=other))
    schedule = scheduler.schedule()
    ((source, _),) = schedule.copies
    for _ in range(3):  # the step fails
        kv.run(schedule)
        assert scheduler.schedule() == schedule
        assert not any(source in entry.seq.block_table[1:] for entry in schedule.entries)
    assert scheduler.abort("again")
    scheduler.check_integrity()
    finished = run_to_end(scheduler, kv)
    assert len(finished) == 3


@pytest.mark.parametrize("prefix_caching", [False, True])
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 24), st.integers(1, 16), st.integers(0, 2)),
        max_size=40,
    ),
    num_blocks=st.integers(10, 24),
    max_batched_tokens=st.integers(4, 12),
)
@settings(max_examples=60, deadline=None)
def test_whatever_arrives_later_the_wait_of_a_request_is_bounded(
    prefix_caching: bool,
    arrivals: list[tuple[int, int, int, int]],
    num_blocks: int,
    max_batched_tokens: int,
) -> None:
    """At most as many steps as it and those before it have tokens; the budget holds in each."""
    scheduler = make(
        num_blocks=num_blocks,
        max_batched_tokens=max_batched_tokens,
        max_queued=100,
        prefix_caching=prefix_caching,
    )
    kv = FakeKv(scheduler)
    last_step: dict[str, int] = {}
    alive: dict[str, Sequence] = {}
    queue = list(arrivals)
    pause = 0
    for step in itertools.count():
        while queue and pause == 0:
            gap, prompt, max_tokens, text = queue.pop(0)
            new = seq(f"r{len(last_step)}", prompt, max_tokens, text=text)
            scheduler.add(new)
            alive[new.request_id] = new
            last_step[new.request_id] = step + sum(s.max_total_tokens for s in alive.values())
            pause = gap
        pause = max(0, pause - 1)
        if not queue and not alive:
            break
        num_preempted = scheduler.num_preemptions
        num_begun = sum(s.num_starts for s in alive.values())
        schedule = scheduler.schedule()
        assert schedule.num_tokens <= max_batched_tokens
        if scheduler.num_preemptions > num_preempted:
            assert sum(s.num_starts for s in alive.values()) == num_begun, "freed blocks went away"
        if alive:
            oldest = next(iter(alive.values()))
            assert any(entry.seq is oldest for entry in schedule.entries), "the oldest waits"
        for done in scheduler.commit(schedule, kv.run(schedule)):
            assert done.output == expected_text(done.prompt, done.params)
            assert step <= last_step[done.request_id]
            del alive[done.request_id]


def test_a_large_request_ends_among_small_ones_that_never_stop_coming() -> None:
    scheduler = make(num_blocks=10, max_batched_tokens=4, max_queued=4)
    kv = FakeKv(scheduler)
    large = seq("large", 20, 20)
    scheduler.add(seq("before", 8, 12, text=1))
    scheduler.add(large)
    for step in range(100):
        while scheduler.num_waiting < 4:
            scheduler.add(seq(f"small-{step}-{scheduler.num_waiting}", 2, 2, text=2))
        schedule = scheduler.schedule()
        scheduler.commit(schedule, kv.run(schedule))
        if large.finish_reason is not None:
            break
    assert large.finish_reason == "length"
    assert step <= 60, "its tokens and those of the one before it"


def test_what_another_begins_to_compute_in_this_step_is_waited_for_once() -> None:
    scheduler = make(num_blocks=40, max_running=8, max_batched_tokens=40, max_queued=9)
    requests = [seq(f"r{i}", 18, 3) for i in range(4)] + [seq("other", 5, 3, text=1)]
    for request in requests:
        scheduler.add(request)
    kv = FakeKv(scheduler)
    schedule = scheduler.schedule()
    assert [entry.seq.request_id for entry in schedule.entries] == ["r0"]
    scheduler.commit(schedule, kv.run(schedule))
    schedule = scheduler.schedule()
    sizes = {entry.seq.request_id: entry.num_tokens for entry in schedule.entries}
    assert sizes == {"r0": 1, "r1": 2, "r2": 2, "r3": 2, "other": 5}
    scheduler.commit(schedule, kv.run(schedule))
    assert scheduler.blocks.num_used == 4 + 4 + 2, "four shared, one each, two of the other"
    run_to_end(scheduler, kv)


def test_a_full_hit_takes_one_token_of_the_budget() -> None:
    scheduler = make(num_blocks=16, max_batched_tokens=16)
    kv = FakeKv(scheduler)
    scheduler.add(seq("first", 12, 2))
    run_to_end(scheduler, kv)
    again = seq("again", 12, 2)
    scheduler.add(again)
    schedule = scheduler.schedule()
    assert (schedule.num_tokens, schedule.num_samples, len(schedule.copies)) == (1, 1, 1)
    assert again.num_cached_tokens == 11
    run_to_end(scheduler, kv)


def test_a_stop_token_ends_without_being_part_of_the_text() -> None:
    scheduler = make()
    ending = expected_text((1, 2, 3), SamplingParams(max_tokens=20))
    stop = ending[5]
    first = ending.index(stop)
    request = seq("a", 3, 20, stop=stop)
    scheduler.add(request)
    run_to_end(scheduler)
    assert request.output == ending[:first]
    assert request.finish_reason == "stop"


def test_the_last_token_ends_by_length() -> None:
    scheduler = make()
    request = seq("a", 3, 5)
    scheduler.add(request)
    run_to_end(scheduler)
    assert len(request.output) == 5
    assert request.finish_reason == "length"


def test_a_budget_below_the_running_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="maxBatchedTokens 3 is less than maxRunning 4"):
        make(max_batched_tokens=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"temperature": -0.1}, "temperature must be 0 or more, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be 0 or more"),
        ({"top_p": 0.0}, "top_p must be in"),
        ({"top_p": 1.1}, "top_p must be in"),
    ],
)
def test_sampling_parameters_are_checked(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**{"max_tokens": 1, **change})  # type: ignore[arg-type]


def test_tokens_of_a_range_cross_from_prompt_to_output() -> None:
    request = seq("a", 3)
    request.output += [7, 8, 9]
    whole = [1, 2, 3, 7, 8, 9]
    for start in range(6):
        for end in range(start, 7):
            assert request.tokens(start, end) == whole[start:end]
    with pytest.raises(ValueError, match="the prompt is empty"):
        Sequence("b", (), SamplingParams(max_tokens=1))
