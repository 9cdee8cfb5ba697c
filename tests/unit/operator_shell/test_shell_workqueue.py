"""The threads around the schedule: real threads, conditions instead of sleeps."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from moe_operator.errors import Conflict, NotLeader, TemporaryError
from moe_operator.workqueue import Backoff, Result, WorkQueue

PATIENCE_SECONDS = 10.0
QUICK = Backoff(base_seconds=0.001, max_seconds=0.01, event_floor_seconds=0.0)


def test_f03_two_temporary_errors_then_the_third_attempt_succeeds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts: list[int] = []
    done = threading.Event()

    def work(key: str, attempt: int) -> Result:
        attempts.append(attempt)
        if attempt < 3:
            raise TemporaryError("not yet")
        done.set()
        return Result()

    queue = WorkQueue(work, num_threads=2, monotonic=time.monotonic, backoff=QUICK)
    with caplog.at_level(logging.INFO):
        queue.start()
        queue.add("a")
        assert done.wait(PATIENCE_SECONDS)
        assert queue.shutdown(PATIENCE_SECONDS)
    assert attempts == [1, 2, 3]
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "attempt 2" in caplog.records[1].getMessage()


@pytest.mark.parametrize(
    ("error", "level"),
    [(Conflict("409"), "INFO"), (NotLeader("no"), "DEBUG"), (RuntimeError("bug"), "ERROR")],
)
def test_how_a_failure_is_told_depends_on_its_kind(
    error: Exception, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    again = threading.Event()

    def work(key: str, attempt: int) -> Result:
        if attempt == 1:
            raise error
        again.set()
        return Result()

    queue = WorkQueue(
        work, num_threads=1, monotonic=time.monotonic, backoff=QUICK,
        log_fields=lambda key: {"deployment": key},
    )  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        queue.start()
        queue.add("a")
        assert again.wait(PATIENCE_SECONDS)
        queue.shutdown(PATIENCE_SECONDS)
    assert [record.levelname for record in caplog.records] == [level]
    assert caplog.records[0].__dict__["deployment"] == "a", "found by the deployment it is about"
    assert (caplog.records[0].exc_info is not None) == (level == "ERROR")


def test_one_pass_a_key_at_a_time_while_different_keys_run_together() -> None:
    lock = threading.Lock()
    running: set[str] = set()
    overlaps: list[str] = []
    both = threading.Barrier(2)
    passes = itertools.count(1)
    enough = threading.Event()

    def work(key: str, attempt: int) -> Result:
        with lock:
            if key in running:
                overlaps.append(key)
            running.add(key)
        both.wait(PATIENCE_SECONDS)  # passes only when a and b are inside together
        with lock:
            running.discard(key)
        if next(passes) >= 20:
            enough.set()
        return Result(requeue_after_seconds=0.0)

    queue = WorkQueue(work, num_threads=2, monotonic=time.monotonic)
    queue.start()
    for _ in range(3):
        queue.add("a")
        queue.add("b")
    assert enough.wait(PATIENCE_SECONDS)
    both.abort()
    queue.shutdown(PATIENCE_SECONDS)
    assert overlaps == []


def test_keys_added_before_the_start_wait_for_it() -> None:
    ran = threading.Event()

    def work(key: str, attempt: int) -> Result:
        ran.set()
        return Result()

    queue = WorkQueue(work, num_threads=1, monotonic=time.monotonic)
    queue.add("a")
    assert queue.depth == 1
    assert not ran.is_set()
    queue.start()
    assert ran.wait(PATIENCE_SECONDS)
    assert queue.shutdown(PATIENCE_SECONDS)


def test_shutdown_waits_for_the_pass_in_progress_and_starts_no_other() -> None:
    inside, finish = threading.Event(), threading.Event()
    ran: list[str] = []

    def work(key: str, attempt: int) -> Result:
        inside.set()
        assert finish.wait(PATIENCE_SECONDS)
        ran.append(key)
        return Result(requeue_after_seconds=0.0)

    queue = WorkQueue(work, num_threads=1, monotonic=time.monotonic)
    queue.start()
    queue.add("a")
    queue.add("b")
    assert inside.wait(PATIENCE_SECONDS)
    assert queue.longest_running_seconds() >= 0.0
    assert not queue.shutdown(deadline_seconds=0.01)
    finish.set()
    assert queue.shutdown(PATIENCE_SECONDS)
    assert ran == ["a"]


def test_a_delayed_key_runs_although_all_other_threads_are_busy_elsewhere() -> None:
    """A thread that slept without a deadline must learn of a later, delayed key."""
    release, delayed = threading.Event(), threading.Event()

    def work(key: str, attempt: int) -> Result:
        if key == "delayed":
            delayed.set()
        else:
            release.wait(PATIENCE_SECONDS)
        return Result()

    queue = WorkQueue(work, num_threads=2, monotonic=time.monotonic)
    queue.start()
    queue.add("delayed", delay_seconds=0.05)
    queue.add("busy")
    assert delayed.wait(PATIENCE_SECONDS)
    release.set()
    assert queue.shutdown(PATIENCE_SECONDS)


def test_each_pass_is_observed_with_its_error() -> None:
    seen: list[tuple[str, Exception | None]] = []
    twice = threading.Event()

    def observe(key: str, seconds: float, error: Exception | None) -> None:
        assert seconds >= 0
        seen.append((key, error))
        if len(seen) == 2:
            twice.set()

    failure = TemporaryError("once")

    def work(key: str, attempt: int) -> Result:
        if attempt == 1:
            raise failure
        return Result()

    queue = WorkQueue(work, num_threads=1, monotonic=time.monotonic, backoff=QUICK, observe=observe)
    queue.start()
    queue.add("a")
    assert twice.wait(PATIENCE_SECONDS)
    queue.shutdown(PATIENCE_SECONDS)
    assert seen == [("a", failure), ("a", None)]
