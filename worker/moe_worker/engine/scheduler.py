"""What the next step computes: continuous batching, chunked prefill, preemption by recompute.

Pure bookkeeping, no torch and no clock. One step has at most `max_batched_tokens` tokens: first
one token of every decoding sequence, then prompt pieces in order of arrival, then newcomers.
A schedule stays the same until it is committed, so a failed step is simply run again.
Neighbours: `admission` says whether the head of the queue begins, `block_tables` gives sequences
their KV blocks and what the prefix cache has of them, `schedule` is the result.

Why nobody starves: sequences are admitted in order of arrival and the head of the queue is never
passed, so those that run are always the oldest; the oldest is never preempted, alone it always fits
(checked by `add`), and running sequences never outnumber the token budget, so it advances by at
least one token in every step. A request ends at the latest after as many steps as it and those
before it have tokens in all, whatever arrives later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from moe_worker.engine.admission import start_for
from moe_worker.engine.block_tables import BlockTables
from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.schedule import Schedule, ScheduledSequence
from moe_worker.engine.sequence import Sequence


class QueueFull(Exception):
    """`max_queued` sequences wait already; try again later."""

    def __init__(self, max_queued: int, retry_after_seconds: float) -> None:
        super().__init__(
            f"{max_queued} requests are queued (scheduler.maxQueued); "
            f"retry after {retry_after_seconds:g} s"
        )
        self.retry_after_seconds = retry_after_seconds


class RequestTooLong(ValueError):
    """Prompt and max_tokens exceed what one sequence may use."""


@dataclass(frozen=True)
class SchedulerLimits:
    max_running: int
    max_batched_tokens: int
    max_queued: int
    max_model_len: int
    block_size: int
    prefix_caching: bool = True
    queue_full_retry_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0 or self.max_model_len < 1:
            raise ValueError(f"scheduler limits out of bounds: {self}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"scheduler.maxBatchedTokens {self.max_batched_tokens} is less than maxRunning "
                f"{self.max_running}; every running sequence needs a token a step"
            )


class Scheduler:
    def __init__(self, limits: SchedulerLimits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
        self.tables = BlockTables(blocks, limits.block_size, limits.prefix_caching)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._pending: Schedule | None = None
        self._num_arrived = 0
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_full(self) -> bool:
        """Those who wait for the next step only, because there is a place to run, do not count."""
        free_places = max(0, self.limits.max_running - len(self._running))
        return len(self._waiting) >= self.limits.max_queued + free_places

    def add(self, seq: Sequence) -> None:
        """Queue `seq`. Raises RequestTooLong or QueueFull; then nothing is kept."""
        limits = self.limits
        longest = min(limits.max_model_len, self.blocks.num_blocks * limits.block_size)
        if seq.max_total_tokens > longest:
            raise RequestTooLong(
                f"the prompt's {len(seq.prompt)} tokens and max_tokens {seq.params.max_tokens} "
                f"exceed {longest}, the longest sequence served"
            )
        if self.is_full:
            raise QueueFull(limits.max_queued, limits.queue_full_retry_seconds)
        seq.arrival = self._num_arrived
        self._num_arrived += 1
        self._waiting.append(seq)

    def abort(self, request_id: str) -> bool:
        """Forget a sequence in any state and free its blocks; False if it is unknown."""
        for group in (self._running, self._waiting):
            for seq in group:
                if seq.request_id == request_id:
                    group.remove(seq)
                    self.tables.release(seq)
                    self._withdraw(seq)
                    return True
        return False

    def schedule(self) -> Schedule:
        """The next step's work; empty when there is none. The same until committed."""
        if self._pending is None:
            budget = self.limits.max_batched_tokens
            decoding = self._schedule_decodes()
            budget -= len(decoding)
            pieces, budget = self._schedule_prefills(budget)
            self._admit(budget, pieces)
            entries = (*decoding, *pieces)
            self._pending = Schedule(entries) if entries else None
        return self._pending or Schedule()

    def commit(self, schedule: Schedule, token_by_request: Mapping[str, int]) -> list[Sequence]:
        """Advance by a step that ran. Returns the finished sequences, their blocks freed.

        Sequences aborted since the schedule was made are passed over.
        """
        pending, self._pending = self._pending, None
        alive = {entry.seq.request_id for entry in pending.entries} if pending else set()
        finished = []
        for entry in schedule.entries:
            seq = entry.seq
            if seq.request_id not in alive:
                continue
            seq.num_computed = entry.start + entry.num_tokens
            self.tables.record(seq)
            if entry.samples:
                self._append(seq, token_by_request[seq.request_id])
            if seq.finish_reason is not None:
                self._running.remove(seq)
                self.tables.release(seq)
                finished.append(seq)
        return finished

    def check_integrity(self) -> None:
        """Blocks are held by live sequences only, each for exactly the tokens it has room for."""
        everyone = [*self._running, *self._waiting]
        self.tables.check_integrity(everyone)
        assert len({seq.request_id for seq in everyone}) == len(everyone), "a request is here twice"
        for seq in self._waiting:
            assert not seq.block_table, f"{seq.request_id} waits with KV blocks"
            assert seq.num_computed == 0, f"{seq.request_id} waits with computed tokens"
        arrivals = [seq.arrival for seq in (*self._running, *self._waiting)]
        assert arrivals == sorted(arrivals), "somebody was passed"

    def _schedule_decodes(self) -> list[ScheduledSequence]:
        """One token of every sequence whose prompt is computed; takes blocks, preempts for them."""
        scheduled: list[ScheduledSequence] = []
        for seq in tuple(self._running):
            num_computed = seq.num_computed
            if seq.num_tokens - num_computed != 1:
                continue
            missing = self.tables.num_missing(seq)
            if missing > 0:
                # The youngest goes first: it is never one that this loop has scheduled already.
                while missing > self.blocks.num_available and self._youngest >= seq.arrival:
                    self._preempt(self._running[-1])
                if self._youngest < seq.arrival:
                    break  # it had to go itself, like all that come after it
                self.tables.grow(seq)
            copy = None if seq.copied_from is None else self.tables.copy_for(seq)
            scheduled.append(ScheduledSequence(seq, num_computed, 1, True, copy))
        return scheduled

    @property
    def _youngest(self) -> int:
        """Arrival of the newest that runs."""
        return self._running[-1].arrival

    def _schedule_prefills(self, budget: int) -> tuple[list[ScheduledSequence], int]:
        """The next piece of the prompt in work. There is at most one: another sequence is admitted
        only when this one's last piece leaves some budget."""
        scheduled = []
        for seq in self._running:
            if seq.num_tokens - seq.num_computed > 1:
                scheduled.append(self._entry(seq, min(seq.num_tokens - seq.num_computed, budget)))
                budget -= scheduled[-1].num_tokens
        return scheduled, budget

    def _admit(self, budget: int, pieces: list[ScheduledSequence]) -> None:
        """Newcomers in order of arrival, as long as budget, places and blocks last.

        A newcomer takes blocks for all its tokens at once, so prefill never waits for blocks.
        """
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_running:
            seq = self._waiting[0]
            start = start_for(
                seq, self.tables, pieces, len(self._running), self.limits.max_batched_tokens
            )
            if start is None:
                break
            self._waiting.popleft()
            self._running.append(seq)
            self.tables.begin(seq, start)
            if seq.num_starts == 0:
                seq.num_cached_tokens = start.num_cached_tokens
            seq.num_starts += 1
            pieces.append(self._entry(seq, min(seq.num_tokens - seq.num_computed, budget)))
            budget -= pieces[-1].num_tokens

    def _append(self, seq: Sequence, token: int) -> None:
        if token in seq.params.stop_token_ids:
            seq.finish_reason = "stop"
            return
        seq.output.append(token)
        if len(seq.output) >= seq.params.max_tokens:
            seq.finish_reason = "length"

    def _preempt(self, seq: Sequence) -> None:
        """Give its blocks back; its tokens are kept, and what is not known any more is computed
        again. It needs all it had to begin again, so it cannot in the step that took from it."""
        self._running.remove(seq)
        self.tables.release(seq)
        self._waiting.appendleft(seq)
        self.num_preemptions += 1

    def _withdraw(self, seq: Sequence) -> None:
        if self._pending is not None:
            entries = tuple(entry for entry in self._pending.entries if entry.seq is not seq)
            self._pending = Schedule(entries) if entries else None

    def _entry(self, seq: Sequence, count: int) -> ScheduledSequence:
        start, copy = seq.num_computed, self.tables.copy_for(seq)
        return ScheduledSequence(seq, start, count, start + count == seq.num_tokens, copy)
