"""Keyed work queue: one pass per key at a time, retries with back-off, bounded threads.

`main` adds keys as events arrive, `reconcile` is the work. `Schedule` decides which key runs when
(pure: time and randomness are arguments); `WorkQueue` is its thin shell of threads.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import random
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from moe_operator.errors import NotLeader, TemporaryError

K = TypeVar("K", bound=Hashable)
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """A pass that succeeded; `requeue_after_seconds` asks for the next one without an event."""

    requeue_after_seconds: float | None = None


@dataclass(frozen=True)
class Backoff:
    """Delay before attempt n+1: base·2^(n−1), at most `max_seconds`, times a jitter in [0.5, 1)."""

    base_seconds: float = 0.2
    max_seconds: float = 60.0
    event_floor_seconds: float = 1.0
    """An ordinary event ends a back-off early, but not earlier than this after the failure."""

    def delay_seconds(self, failures: int, jitter: float) -> float:
        """`jitter` in [0, 1), from the caller's random source."""
        longest = self.base_seconds * 2.0 ** min(failures - 1, 32)
        return min(longest, self.max_seconds) * (0.5 + jitter / 2)


@dataclass
class _Entry:
    due: float | None = None
    """When the next pass may begin; None = nothing asked."""
    urgent: bool = False
    running: bool = False
    failures: int = 0
    earliest: float = 0.0
    """Floor for ordinary events while the key fails."""
    ticket: int = -1
    """The one heap item that counts for this key; older ones are stale, −1 = none."""


class Schedule(Generic[K]):
    """Which key runs when. Not thread-safe; `now` never goes back (monotonic seconds)."""

    def __init__(self, backoff: Backoff, jitter: Callable[[], float]) -> None:
        self._backoff, self._jitter = backoff, jitter
        self._entries: dict[K, _Entry] = {}
        self._waiting: list[tuple[float, int, K]] = []
        self._ready: list[tuple[bool, int, K]] = []
        self._tickets = itertools.count()

    def add(self, key: K, now: float, *, delay_seconds: float = 0.0, urgent: bool = False) -> None:
        """Ask for a pass; the earliest and most urgent of several wishes wins."""
        entry = self._entries.setdefault(key, _Entry())
        due = now + delay_seconds
        if entry.failures and not urgent:
            due = max(due, entry.earliest)
        self._ask(key, entry, due, urgent)

    def pop(self, now: float) -> tuple[K, int] | None:
        """The next key to run and its attempt number (1 = no failure before), or None."""
        self._promote(now)
        while self._ready:
            _, ticket, key = heapq.heappop(self._ready)
            entry = self._entries.get(key)
            if entry is None or entry.ticket != ticket or entry.running:
                continue
            entry.due, entry.urgent, entry.running, entry.ticket = None, False, True, -1
            return key, entry.failures + 1
        return None

    def succeeded(self, key: K, now: float, requeue_after_seconds: float | None) -> None:
        entry = self._finish(key)
        entry.failures = 0
        if requeue_after_seconds is not None:
            self._ask(key, entry, now + requeue_after_seconds, urgent=False)
        elif entry.due is not None:
            self._push(key, entry, entry.due)
        else:
            del self._entries[key]

    def failed(self, key: K, now: float, retry_after_seconds: float | None) -> float:
        """Plan the retry; returns its delay in seconds."""
        entry = self._finish(key)
        entry.failures += 1
        delay = self._backoff.delay_seconds(entry.failures, self._jitter())
        delay = max(delay, retry_after_seconds or 0.0)
        entry.earliest = now + min(delay, self._backoff.event_floor_seconds)
        if entry.due is not None and not entry.urgent:
            entry.due = max(entry.due, entry.earliest)
        self._ask(key, entry, now + delay, urgent=False)
        return delay

    def seconds_to_next(self, now: float) -> float | None:
        """Time until some key becomes due; 0 when one is ready, None when nothing waits."""
        self._promote(now)
        if self._ready:
            return 0.0
        return max(0.0, self._waiting[0][0] - now) if self._waiting else None

    @property
    def pending(self) -> int:
        """Keys that have another pass before them, due or not."""
        return sum(entry.due is not None for entry in self._entries.values())

    def depth(self, now: float) -> int:
        """Keys whose pass is due and has not begun."""
        dues = (entry.due for entry in self._entries.values() if not entry.running)
        return sum(due is not None and due <= now for due in dues)

    def _ask(self, key: K, entry: _Entry, due: float, urgent: bool) -> None:
        earliest = due if entry.due is None else min(entry.due, due)
        changed = earliest != entry.due or (urgent and not entry.urgent)
        entry.due, entry.urgent = earliest, entry.urgent or urgent
        if not entry.running and (changed or entry.ticket < 0):
            self._push(key, entry, earliest)

    def _push(self, key: K, entry: _Entry, due: float) -> None:
        entry.ticket = next(self._tickets)
        heapq.heappush(self._waiting, (due, entry.ticket, key))

    def _promote(self, now: float) -> None:
        """Move what is due to the ready heap, urgent first; drop stale items on the way."""
        while self._waiting:
            due, ticket, key = self._waiting[0]
            entry = self._entries.get(key)
            if entry is None or entry.ticket != ticket or entry.running:
                heapq.heappop(self._waiting)
                continue
            if due > now:
                return
            heapq.heappop(self._waiting)
            heapq.heappush(self._ready, (not entry.urgent, ticket, key))

    def _finish(self, key: K) -> _Entry:
        entry = self._entries[key]
        assert entry.running, f"{key} finished but was not running"
        entry.running = False
        return entry


class WorkQueue(Generic[K]):
    """Runs `work(key, attempt)` in `num_threads` threads.

    `work` returns a `Result`, or raises: a `TemporaryError` is retried quietly, anything else is
    retried too and logged as an error. `observe(key, seconds, error)` is called after each pass;
    `log_fields(key)` is what the log lines about a key carry.
    """

    def __init__(
        self,
        work: Callable[[K, int], Result],
        *,
        num_threads: int,
        monotonic: Callable[[], float],
        backoff: Backoff | None = None,
        jitter: Callable[[], float] = random.random,
        observe: Callable[[K, float, Exception | None], None] = lambda *_: None,
        log_fields: Callable[[K], Mapping[str, object]] = lambda _: {},
    ) -> None:
        self._work, self._monotonic, self._observe = work, monotonic, observe
        self._log_fields = log_fields
        self._schedule: Schedule[K] = Schedule(backoff or Backoff(), jitter)
        self._changed = threading.Condition()
        self._stopping = False
        self._running_since: dict[K, float] = {}
        self._threads = [
            threading.Thread(target=self._run, name=f"reconcile-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self) -> None:
        """Begin to work; keys added before wait until now (a standby only collects)."""
        for thread in self._threads:
            thread.start()

    def add(self, key: K, *, delay_seconds: float = 0.0, urgent: bool = False) -> None:
        """Ask for a pass over `key`; thread-safe, never blocks on work."""
        with self._changed:
            if self._stopping:
                return
            self._schedule.add(key, self._monotonic(), delay_seconds=delay_seconds, urgent=urgent)
            self._changed.notify()

    def shutdown(self, deadline_seconds: float) -> bool:
        """Start no further pass and wait for those running; False when some did not end in time."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        end = self._monotonic() + deadline_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - self._monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def depth(self) -> int:
        """Keys that wait for a thread."""
        with self._changed:
            return self._schedule.depth(self._monotonic())

    def longest_running_seconds(self) -> float:
        """Age of the oldest pass in progress; a pass that never ends shows here."""
        with self._changed:
            now = self._monotonic()
            return max((now - since for since in self._running_since.values()), default=0.0)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            key, attempt = taken
            began = self._monotonic()
            result, error = Result(), None
            try:
                result = self._work(key, attempt)
            except Exception as raised:  # every failure of a pass is retried, and told in _put_back
                error = raised
            self._put_back(key, attempt, result, error)
            self._observe(key, self._monotonic() - began, error)

    def _take(self) -> tuple[K, int] | None:
        with self._changed:
            while not self._stopping:
                now = self._monotonic()
                taken = self._schedule.pop(now)
                if taken is not None:
                    self._running_since[taken[0]] = now
                    self._changed.notify()  # another thread now watches what is due next
                    return taken
                self._changed.wait(self._schedule.seconds_to_next(now))
            return None

    def _put_back(self, key: K, attempt: int, result: Result, error: Exception | None) -> None:
        with self._changed:
            now = self._monotonic()
            del self._running_since[key]
            if error is None:
                self._schedule.succeeded(key, now, result.requeue_after_seconds)
                self._changed.notify()
                return
            hint = error.retry_after_seconds if isinstance(error, TemporaryError) else None
            delay = self._schedule.failed(key, now, hint)
            self._changed.notify()
        self._tell(key, attempt, delay, error)

    def _tell(self, key: K, attempt: int, delay_seconds: float, error: Exception) -> None:
        told = "pass over %s failed (attempt %d), next in %.1f s: %s"
        extra = self._log_fields(key)
        if isinstance(error, NotLeader):
            logger.debug(told, key, attempt, delay_seconds, error, extra=extra)
        elif isinstance(error, TemporaryError):
            logger.info(told, key, attempt, delay_seconds, error, extra=extra)
        else:
            logger.error(told, key, attempt, delay_seconds, error, exc_info=error, extra=extra)
