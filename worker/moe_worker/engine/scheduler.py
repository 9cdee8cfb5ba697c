"""What the next step computes: continuous batching, chunked prefill, preemption by recompute.

Pure bookkeeping, no torch and no clock. One step has at most `max_batched_tokens` tokens: first
one token of every decoding sequence, then prompt pieces in order of arrival, then newcomers.
A schedule stays the same until it is committed, so a failed step is simply run again.
Neighbours: `blocks` owns the KV blocks, `batch` turns a schedule into tensors.

Why nobody starves: sequences are admitted in order of arrival and the head of the queue is never
passed; the oldest running sequence is never preempted and one alone always fits (checked by `add`);
running sequences never outnumber the token budget, so each gets at least one token a step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from moe_worker.engine.blocks import BlockPool
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
    queue_full_retry_seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0 or self.max_model_len < 1:
            raise ValueError(f"scheduler limits out of bounds: {self}")
        if self.max_batched_tokens < self.max_running:
            raise ValueError(
                f"scheduler.maxBatchedTokens {self.max_batched_tokens} is less than maxRunning "
                f"{self.max_running}; every running sequence needs a token a step"
            )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class ScheduledSequence:
    seq: Sequence
    start: int
    """Position of the first token to compute."""
    num_tokens: int
    samples: bool
    """The last token to compute is the newest one, so a next token is drawn."""


@dataclass(frozen=True)
class Schedule:
    entries: tuple[ScheduledSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_samples(self) -> int:
        return sum(entry.samples for entry in self.entries)


class Scheduler:
    def __init__(self, limits: SchedulerLimits, blocks: BlockPool) -> None:
        self.limits = limits
        self.blocks = blocks
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

    def add(self, seq: Sequence) -> None:
        """Queue `seq`. Raises RequestTooLong or QueueFull; then nothing is kept."""
        limits = self.limits
        longest = min(limits.max_model_len, self.blocks.num_blocks * limits.block_size)
        if seq.max_total_tokens > longest:
            raise RequestTooLong(
                f"the prompt's {len(seq.prompt)} tokens and max_tokens {seq.params.max_tokens} "
                f"exceed {longest}, the longest sequence served"
            )
        if len(self._waiting) >= limits.max_queued:
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
                    self._release(seq)
                    self._withdraw(seq)
                    return True
        return False

    def schedule(self) -> Schedule:
        """The next step's work; empty when there is none. The same until committed."""
        if self._pending is None:
            budget = self.limits.max_batched_tokens
            decoding, preempted = self._schedule_decodes()
            budget -= len(decoding)
            prefilling, budget = self._schedule_prefills(budget)
            # Who was just preempted must not take the freed blocks back in the same step.
            admitted = [] if preempted else self._admit(budget)
            entries = (*decoding, *prefilling, *admitted)
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
            if entry.seq.request_id not in alive:
                continue
            entry.seq.num_computed = entry.start + entry.num_tokens
            if entry.samples:
                self._append(entry.seq, token_by_request[entry.seq.request_id])
            if entry.seq.finish_reason is not None:
                self._running.remove(entry.seq)
                self._release(entry.seq)
                finished.append(entry.seq)
        return finished

    def check_integrity(self) -> None:
        """Blocks are held by live sequences only, each for exactly the tokens it has room for."""
        everyone = [*self._running, *self._waiting]
        self.blocks.check_integrity(seq.block_table for seq in everyone)
        assert len({seq.request_id for seq in everyone}) == len(everyone), "a request is here twice"
        for seq in self._waiting:
            assert not seq.block_table, f"{seq.request_id} waits with KV blocks"
            assert seq.num_computed == 0, f"{seq.request_id} waits with computed tokens"
        for seq in self._running:
            room = len(seq.block_table) * self.limits.block_size
            assert seq.num_computed <= room, f"{seq.request_id} computed past its blocks"
        arrivals = [seq.arrival for seq in self._waiting]
        assert arrivals == sorted(arrivals), "the queue is out of order"

    def _schedule_decodes(self) -> tuple[list[ScheduledSequence], bool]:
        """One token of every sequence whose prompt is computed; takes blocks, preempts for them."""
        scheduled: list[ScheduledSequence] = []
        preempted = False
        for seq in tuple(self._running):
            if seq.num_tokens - seq.num_computed != 1:
                continue
            missing = self.limits.blocks_for(seq.num_tokens) - len(seq.block_table)
            # The youngest goes first: it is never one that this loop has scheduled already.
            while missing > self.blocks.num_free and self._running[-1].arrival >= seq.arrival:
                self._preempt(self._running[-1])
                preempted = True
            if self._running[-1].arrival < seq.arrival:
                break
            seq.block_table += self.blocks.take(missing)
            scheduled.append(_entry(seq, 1))
        return scheduled, preempted

    def _schedule_prefills(self, budget: int) -> tuple[list[ScheduledSequence], int]:
        """The next piece of the prompt in work. There is at most one: another sequence is admitted
        only when this one's last piece leaves some budget."""
        scheduled = []
        for seq in self._running:
            if seq.num_tokens - seq.num_computed > 1:
                scheduled.append(_entry(seq, min(seq.num_tokens - seq.num_computed, budget)))
                budget -= scheduled[-1].num_tokens
        return scheduled, budget

    def _admit(self, budget: int) -> list[ScheduledSequence]:
        """Newcomers in order of arrival, as long as budget, places and blocks last.

        A newcomer takes blocks for all its tokens at once, so prefill never waits for blocks.
        """
        scheduled = []
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_running:
            seq = self._waiting[0]
            needed = self.limits.blocks_for(seq.num_tokens)
            if needed + self._headroom(seq) > self.blocks.num_free:
                break
            self._waiting.popleft()
            self._running.append(seq)
            seq.block_table = self.blocks.take(needed)
            scheduled.append(_entry(seq, min(seq.num_tokens, budget)))
            budget -= scheduled[-1].num_tokens
        return scheduled

    def _headroom(self, newcomer: Sequence) -> int:
        """Blocks that the running sequences may ask for until the newcomer draws its first token.

        They stay free, else the newcomer, being the youngest, would be preempted for nothing.
        """
        num_running = len(self._running)
        per_step = self.limits.max_batched_tokens - num_running
        return num_running * self.limits.blocks_for(-(-newcomer.num_tokens // per_step))

    def _append(self, seq: Sequence, token: int) -> None:
        if token in seq.params.stop_token_ids:
            seq.finish_reason = "stop"
            return
        seq.output.append(token)
        if len(seq.output) >= seq.params.max_tokens:
            seq.finish_reason = "length"

    def _preempt(self, seq: Sequence) -> None:
        """Give its blocks back; its tokens are kept and computed again from the first."""
        self._running.remove(seq)
        self._release(seq)
        self._waiting.appendleft(seq)
        self.num_preemptions += 1

    def _release(self, seq: Sequence) -> None:
        self.blocks.release(reversed(seq.block_table))
        seq.block_table = []
        seq.num_computed = 0

    def _withdraw(self, seq: Sequence) -> None:
        if self._pending is not None:
            entries = tuple(entry for entry in self._pending.entries if entry.seq is not seq)
            self._pending = Schedule(entries) if entries else None


def _entry(seq: Sequence, count: int) -> ScheduledSequence:
    samples = seq.num_computed + count == seq.num_tokens
    return ScheduledSequence(seq, seq.num_computed, count, samples)
