"""The kernels are made ready beside everything else, and how far they are can be read meanwhile."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_api.worker import WarmUpState
from moe_kernels import implementation
from moe_kernels.warm_up import Needs, Step
from moe_worker.engine import warm_up
from moe_worker.engine.observer import Unobserved
from moe_worker.engine.warm_up import WarmUp
from moe_worker.membership import Cancelled

NEEDS = Needs(frozenset({torch.float32}))
DEADLINE_SECONDS = 60.0


class Watching(Unobserved):
    def __init__(self) -> None:
        self.seconds: list[float] = []

    def warmed_up(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Slow:
    """Steps that go on when they are told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.failure = failure
        steps = [Step("one", self._run), Step("two", self._run)]
        monkeypatch.setattr(warm_up, "warm_up_steps", lambda needs: steps)

    def _run(self) -> None:
        self.begun.release()
        assert self.go_on.acquire(timeout=DEADLINE_SECONDS)
        if self.failure is not None:
            raise self.failure


def test_progress_names_the_step_under_way_until_all_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow, observer = Slow(monkeypatch), Watching()
    warming = WarmUp(NEEDS, observer)
    assert warming.progress is None
    warming.start()
    for done, name in enumerate(["one", "two"]):
        assert slow.begun.acquire(timeout=DEADLINE_SECONDS)
        assert warming.progress == WarmUpState(done=done, total=2, step=name)
        assert observer.seconds == []
        slow.go_on.release()
    warming.wait()
    assert warming.progress is None
    assert len(observer.seconds) == 1


def test_who_waits_learns_what_a_kernel_failed_with(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, ValueError("no such instruction"))
    warming = WarmUp(NEEDS, Unobserved())
    warming.start()
    slow.go_on.release()
    with pytest.raises(ValueError, match="no such instruction"):
        warming.wait()


def test_a_worker_that_stops_begins_no_further_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    warming = WarmUp(NEEDS, Unobserved())
    warming.start()
    assert slow.begun.acquire(timeout=DEADLINE_SECONDS)
    stopping = threading.Thread(target=warming.stop)
    stopping.start()
    slow.go_on.release()
    slow.go_on.release()
    stopping.join(DEADLINE_SECONDS)
    assert not stopping.is_alive()
    with pytest.raises(Cancelled):
        warming.wait()
    assert not slow.begun.acquire(blocking=False)


def test_the_reference_is_ready_at_once() -> None:
    observer = Watching()
    with implementation.using("reference"):
        warming = WarmUp(NEEDS, observer)
        warming.start()
        warming.wait()
    assert warming.progress is None
    assert len(observer.seconds) == 1
