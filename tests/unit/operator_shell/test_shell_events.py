"""Events become series: few writes, bounded memory, nothing lost silently."""

from __future__ import annotations

import datetime
import threading
import time
from typing import Any

import pytest

from moe_operator import events
from moe_operator.context import Clock
from moe_operator.errors import Refused, Unavailable
from moe_operator.events import Event, EventRecorder, Series

WALL = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
PATIENCE_SECONDS = 10.0
OBJECT = {
    "kind": "MoEDeployment", "metadata": {"namespace": "n", "name": "d", "uid": "u"}
}  # fmt: skip


def event(reason: str = "RankLost", note: str = "rank 1 is gone") -> Event:
    return Event("n", "MoEDeployment", "d", "u", "Warning", reason, "Reconcile", note)


def test_the_same_event_again_raises_a_count_and_is_written_rarely() -> None:
    series = Series()
    series.add(event(), WALL, now=0.0)
    line = series.next_due(now=0.0)
    assert line is not None
    series.posted(line, line.count, now=0.0)
    for second in range(1, 10):
        series.add(event(), WALL, now=float(second))
    assert series.next_due(now=9.0) is None
    assert series.seconds_to_next(now=9.0) == pytest.approx(21.0)
    again = series.next_due(now=30.0)
    assert again is line
    assert again.count == 10


def test_an_event_after_a_long_silence_is_a_new_one() -> None:
    series = Series()
    series.add(event(), WALL, now=0.0)
    first = series.next_due(now=0.0)
    assert first is not None
    series.posted(first, 1, now=0.0)
    series.add(event(), WALL, now=361.0)
    second = series.next_due(now=361.0)
    assert second is not None
    assert second is not first
    assert second.count == 1


def test_different_notes_are_different_events() -> None:
    series = Series()
    series.add(event(note="rank 1"), WALL, now=0.0)
    series.add(event(note="rank 2"), WALL, now=0.0)
    seen = set()
    while (line := series.next_due(now=0.0)) is not None:
        seen.add(line.event.note)
        series.posted(line, line.count, now=0.0)
    assert seen == {"rank 1", "rank 2"}


def test_memory_is_bounded_and_what_is_dropped_is_counted() -> None:
    series = Series()
    for number in range(events.MAX_SERIES + 5):
        series.add(event(note=str(number)), WALL, now=0.0)
    assert series.dropped == 5


def test_a_late_answer_about_a_dropped_line_is_harmless() -> None:
    series = Series()
    series.add(event(), WALL, now=0.0)
    line = series.next_due(now=0.0)
    assert line is not None
    series.add(event(), WALL, now=400.0)  # replaced meanwhile
    series.forget(line)
    assert series.next_due(now=400.0) is not None


class Door:
    """Stands where `cluster` is; fails as told, then takes everything."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.applied: list[dict[str, Any]] = []
        self.changed = threading.Condition()

    def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            if self.failures:
                error = self.failures.pop(0)
                self.changed.notify_all()
                raise error
            self.applied.append(manifest)
            self.changed.notify_all()
        return manifest

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.applied) >= count, PATIENCE_SECONDS)


def recorder(door: Door) -> EventRecorder:
    clock = Clock(monotonic=time.monotonic, wall=lambda: WALL)
    return EventRecorder(door, clock, "operator-0")  # type: ignore[arg-type]


def test_what_is_posted_is_an_events_k8s_io_event_about_the_object() -> None:
    door = Door()
    posting = recorder(door)
    posting.start()
    posting.record(OBJECT, "Warning", "RankLost", "é" * 2000)
    door.wait_for(1)
    posting.stop(PATIENCE_SECONDS)
    manifest = door.applied[0]
    assert manifest["apiVersion"] == "events.k8s.io/v1"
    assert manifest["regarding"] == {
        "apiVersion": "moe-operator.dev/v1alpha1", "kind": "MoEDeployment",
        "namespace": "n", "name": "d", "uid": "u",
    }  # fmt: skip
    assert manifest["metadata"]["name"].startswith("d.")
    assert manifest["eventTime"] == "2026-01-01T12:00:00.000000Z"
    assert len(manifest["note"].encode()) <= events.MAX_NOTE_BYTES
    assert "series" not in manifest


def test_what_was_recorded_before_the_end_is_written_at_the_end() -> None:
    door = Door()
    posting = recorder(door)
    for number in range(3):
        posting.record(OBJECT, "Normal", "RankJoined", f"rank {number}")
    posting.start()
    posting.stop(PATIENCE_SECONDS)
    assert {m["note"] for m in door.applied} == {"rank 0", "rank 1", "rank 2"}


def test_a_refused_event_is_dropped_once_and_a_later_one_still_goes_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door(Refused("no", 422, "Invalid"))
    posting = recorder(door)
    posting.start()
    posting.record(OBJECT, "Normal", "RankJoined", "first")
    posting.record(OBJECT, "Normal", "RankJoined", "second")
    door.wait_for(1)
    posting.stop(PATIENCE_SECONDS)
    assert [m["note"] for m in door.applied] == ["second"]
    assert "RankJoined" in caplog.text


def test_an_event_waits_while_the_api_server_is_away() -> None:
    series = Series()
    series.add(event(), WALL, now=0.0)
    line = series.next_due(now=0.0)
    assert line is not None
    series.put_off(line, now=0.0)
    assert series.next_due(now=1.0) is None
    assert series.next_due(now=30.0) is line
    door = Door(Unavailable("away"))
    posting = recorder(door)
    posting.record(OBJECT, "Normal", "RankJoined", "later")
    posting.start()
    posting.stop(PATIENCE_SECONDS)
    assert door.applied == []
