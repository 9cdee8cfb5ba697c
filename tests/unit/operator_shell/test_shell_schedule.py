"""The order of passes, decided without threads and without time passing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moe_operator.workqueue import Backoff, Schedule

BACKOFF = Backoff(base_seconds=1.0, max_seconds=10.0, event_floor_seconds=2.0)


def schedule() -> Schedule[str]:
    return Schedule(BACKOFF, jitter=lambda: 0.0)  # delays are half of base·2^(n−1)


def test_a_key_added_many_times_runs_once() -> None:
    queue = schedule()
    for _ in range(5):
        queue.add("a", now=0.0)
    assert queue.pending == 1
    assert queue.pop(now=0.0) == ("a", 1)
    assert queue.pop(now=0.0) is None


def test_a_key_never_runs_twice_at_a_time_and_runs_again_when_asked_meanwhile() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    assert queue.pop(now=0.0) == ("a", 1)
    queue.add("a", now=1.0)
    assert queue.pop(now=1.0) is None
    queue.succeeded("a", now=2.0, requeue_after_seconds=None)
    assert queue.pop(now=2.0) == ("a", 1)


def test_a_wish_during_the_pass_survives_a_later_requeue_of_the_pass_itself() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    queue.pop(now=0.0)
    queue.add("a", now=1.0)
    queue.succeeded("a", now=2.0, requeue_after_seconds=60.0)
    assert queue.pop(now=2.0) == ("a", 1)


def test_f03_a_work_that_fails_twice_is_tried_a_third_time() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    assert queue.pop(now=0.0) == ("a", 1)
    assert queue.failed("a", now=0.0, retry_after_seconds=None) == 0.5
    assert queue.pop(now=0.49) is None
    assert queue.pop(now=0.5) == ("a", 2)
    assert queue.failed("a", now=0.5, retry_after_seconds=None) == 1.0
    assert queue.pop(now=1.5) == ("a", 3)
    queue.succeeded("a", now=1.5, requeue_after_seconds=None)
    queue.add("a", now=2.0)
    assert queue.pop(now=2.0) == ("a", 1)


def test_backoff_grows_to_its_maximum_and_jitter_only_shortens_it() -> None:
    delays = [BACKOFF.delay_seconds(n, jitter=1.0 - 1e-9) for n in range(1, 7)]
    assert [round(delay, 3) for delay in delays] == [1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    assert BACKOFF.delay_seconds(10_000, jitter=0.0) == 5.0


def test_the_servers_retry_after_is_a_floor() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    queue.pop(now=0.0)
    assert queue.failed("a", now=0.0, retry_after_seconds=30.0) == 30.0


def test_an_event_ends_a_backoff_early_but_not_at_once() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    now = 0.0
    for _ in range(5):  # delays 0.5, 1, 2, 4, 5
        queue.pop(now)
        now += queue.failed("a", now, retry_after_seconds=None)
    failed_at = now - 5.0
    queue.add("a", now=failed_at + 0.5)
    assert queue.pop(failed_at + 1.9) is None
    assert queue.pop(failed_at + 2.0) == ("a", 6)


def test_an_urgent_event_does_not_wait_for_a_backoff() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    queue.pop(now=0.0)
    queue.failed("a", now=0.0, retry_after_seconds=30.0)
    queue.add("a", now=1.0, urgent=True)
    assert queue.pop(now=1.0) == ("a", 2)


def test_urgent_keys_overtake_those_that_wait_for_a_thread() -> None:
    queue = schedule()
    for key in ("a", "b", "c"):
        queue.add(key, now=0.0)
    queue.add("c", now=0.0, urgent=True)
    assert [queue.pop(now=0.0) for _ in range(3)] == [("c", 1), ("a", 1), ("b", 1)]


def test_the_earliest_of_several_wishes_wins() -> None:
    queue = schedule()
    queue.add("a", now=0.0, delay_seconds=60.0)
    queue.add("a", now=0.0, delay_seconds=5.0)
    queue.add("a", now=0.0, delay_seconds=30.0)
    assert queue.seconds_to_next(now=0.0) == 5.0
    assert queue.pop(now=5.0) == ("a", 1)
    queue.succeeded("a", now=5.0, requeue_after_seconds=None)
    assert queue.seconds_to_next(now=5.0) is None


def test_the_depth_counts_what_waits_for_a_thread_not_what_is_planned() -> None:
    queue = schedule()
    queue.add("a", now=0.0)
    queue.add("b", now=0.0, delay_seconds=30.0)
    queue.add("c", now=0.0)
    queue.pop(now=0.0)
    queue.add("a", now=0.0)  # runs; its next pass waits for it, not for a thread
    assert queue.pending == 3
    assert queue.depth(now=0.0) == 1
    assert queue.depth(now=30.0) == 2


Step = st.tuples(
    st.sampled_from(("add", "urgent", "delayed", "pop", "succeed", "requeue", "fail")),
    st.sampled_from("abc"),
)


@given(st.lists(Step, max_size=60))
def test_no_wish_is_lost_and_no_key_runs_twice_at_a_time(steps: list[tuple[str, str]]) -> None:
    queue, now = schedule(), 0.0
    running: set[str] = set()
    owed: set[str] = set()
    for step, key in steps:
        now += 0.25
        if step in ("add", "urgent", "delayed"):
            delay = 3.0 if step == "delayed" else 0.0
            queue.add(key, now, delay_seconds=delay, urgent=step == "urgent")
            owed.add(key)
        elif step == "pop":
            if (taken := queue.pop(now)) is not None:
                assert taken[0] not in running
                assert taken[0] in owed
                running.add(taken[0])
                owed.discard(taken[0])
        elif key in running:
            running.discard(key)
            if step == "fail":
                queue.failed(key, now, retry_after_seconds=None)
            else:
                queue.succeeded(key, now, 5.0 if step == "requeue" else None)
            if step != "succeed":
                owed.add(key)
        assert queue.pending == len(owed)
    for key in running:
        queue.succeeded(key, now, requeue_after_seconds=None)
    later = now + 1000.0
    left = set()
    while (taken := queue.pop(later)) is not None:
        left.add(taken[0])
    assert left == owed
