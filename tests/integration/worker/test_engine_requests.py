"""One engine with its thread, in a group of one: what requests are told, come what may."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_api.plan import GroupPlan, Member, PlanError, encode_layers
from moe_api.worker import KvConfig, ModelConfig, SchedulerConfig, WorkerConfig, WorkerPhase
from moe_placement.initial import contiguous
from moe_worker.engine.engine import Engine
from moe_worker.engine.events import Event, Finished, NotAdmitting, Prompt, Token
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.scheduler import QueueFull, RequestTooLong
from moe_worker.engine.settings import EngineSettings
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.worker_processes import wait_until

PLACEMENT = contiguous(2, 8, 1, 9)
GREEDY = SamplingParams(max_tokens=6)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "m", seed=5)


def make(model: Path, memory_bytes: int = 2 << 30, **scheduler: int) -> Engine:
    limits = {"max_running": 4, "max_batched_tokens": 32, "max_queued": 8} | scheduler
    config = WorkerConfig(
        model=ModelConfig(path=str(model), served_name="m"),
        kv=KvConfig(dtype="fp32", blocks=32),
        scheduler=SchedulerConfig(**limits),
    )
    arch = load_architecture(model)
    settings = EngineSettings(config, 0, "inc", "token", memory_bytes=memory_bytes)
    return Engine(settings, arch, Checkpoint(model, arch))


def plan(generation: int = 1, slots: np.ndarray = PLACEMENT) -> GroupPlan:
    member = Member(id=0, pod="p", uid="u", address="127.0.0.1", incarnation="inc")
    return GroupPlan(
        namespace="n", deployment="d", group=0, leader_epoch=1, generation=generation,
        epoch=generation, members=[member], layers=encode_layers(slots),
    )  # fmt: skip


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = make(model)
    engine.start()
    engine.put_plan(plan())
    wait_until(lambda: engine.admitting, "the engine admits requests")
    yield engine
    engine.stop()


class Listener:
    """Collects a request's events; `hold` keeps the engine in the first token until released."""

    def __init__(self, hold: bool = False) -> None:
        self.events: list[Event] = []
        self.began, self.released, self.ended = (threading.Event() for _ in range(3))
        if not hold:
            self.released.set()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.began.set()
        assert self.released.wait(30.0)
        if isinstance(event, Finished):
            self.ended.set()

    def end(self) -> Finished:
        assert self.ended.wait(30.0), "the request never ended"
        assert sum(isinstance(event, Finished) for event in self.events) == 1
        last = self.events[-1]
        assert isinstance(last, Finished)
        return last

    @property
    def tokens(self) -> list[int]:
        return [event.token_id for event in self.events if isinstance(event, Token)]


def test_tokens_and_one_end_with_what_was_used(engine: Engine) -> None:
    listener = Listener()
    engine.submit("a", [1, 2, 3], GREEDY, listener)
    assert listener.end() == Finished("length", None, 3, 6)
    assert [e.index for e in listener.events if isinstance(e, Token)] == list(range(6))


def test_a_stop_token_ends_and_is_not_sent(engine: Engine) -> None:
    first = Listener()
    engine.submit("a", [1, 2, 3], GREEDY, first)
    first.end()
    stop = first.tokens[2]
    second = Listener()
    params = SamplingParams(max_tokens=6, stop_token_ids=frozenset([stop]))
    engine.submit("b", [1, 2, 3], params, second)
    kept = first.tokens.index(stop)
    assert second.end() == Finished("stop", None, 3, kept)
    assert second.tokens == first.tokens[:kept]


def test_a_cancelled_request_ends_at_the_next_step_and_gives_its_blocks_back(
    engine: Engine,
) -> None:
    listener = Listener(hold=True)
    engine.submit("a", [1, 2, 3], SamplingParams(max_tokens=200), listener)
    assert listener.began.wait(30.0)
    assert engine.cancel("a")
    listener.released.set()
    assert listener.end() == Finished("cancelled", None, 3, 1)
    assert not engine.cancel("a")
    wait_until(lambda: engine.state().kv_blocks_used == 0, "its blocks are free")


def test_e04_a_queued_request_is_cancelled_and_never_begins(model: Path) -> None:
    engine = make(model, max_running=1)
    engine.start()
    try:
        engine.put_plan(plan())
        wait_until(lambda: engine.admitting, "the engine admits requests")
        running, queued = Listener(hold=True), Listener()
        engine.submit("a", [1, 2, 3], GREEDY, running)
        assert running.began.wait(30.0)
        engine.submit("b", [4, 5], GREEDY, queued)
        assert engine.cancel("b")
        running.released.set()
        assert queued.end() == Finished("cancelled", None, 2, 0)
        assert running.end() == Finished("length", None, 3, 6), "the other goes on"
        wait_until(lambda: engine.state().kv_blocks_used == 0, "all blocks are free")
    finally:
        engine.stop()


def test_e04_a_request_is_cancelled_in_the_middle_of_its_prompt(engine: Engine) -> None:
    """120 tokens take four steps of 32; the cancel comes with the neighbour's third token."""
    prompt, used = Listener(), []
    told = Listener(hold=True)

    def neighbour(event: Event) -> None:
        told(event)
        if isinstance(event, Token) and event.index == 2:
            used.append(engine.state().kv_blocks_used)
            assert engine.cancel("long")

    engine.submit("a", [1, 2, 3], SamplingParams(max_tokens=8), neighbour)
    assert told.began.wait(30.0)
    engine.submit("long", [7] * 120, GREEDY, prompt)
    told.released.set()
    assert prompt.end() == Finished("cancelled", None, 120, 0)
    assert told.end() == Finished("length", None, 3, 8), "the other goes on"
    assert used[0] > 1, "the prompt had begun"
    wait_until(lambda: engine.state().kv_blocks_used == 0, "all blocks are free")


def test_what_does_not_fit_is_refused_at_the_door(engine: Engine) -> None:
    with pytest.raises(RequestTooLong):
        engine.submit("a", [1] * 10, SamplingParams(max_tokens=100_000), Listener())
    running = Listener(hold=True)
    engine.submit("b", [1, 2, 3], GREEDY, running)
    assert running.began.wait(30.0)
    # The engine stands in the first token: nothing leaves the queue now. Three more may run.
    for number in range(8 + 3):
        engine.submit(f"q{number}", [1], GREEDY, Listener())
    with pytest.raises(QueueFull):
        engine.submit("one too many", [1], GREEDY, Listener())
    with pytest.raises(ValueError, match="in use"):
        engine.submit("b", [1], GREEDY, Listener())
    running.released.set()
    running.end()
    wait_until(lambda: engine.state().requests_running == 0, "all are answered")


def test_logits_that_are_not_finite_end_their_request_alone(engine: Engine) -> None:
    wanted = Listener()
    engine.submit("alone", [1, 2, 3], GREEDY, wanted)
    wanted.end()
    loaded = engine.loader.loaded
    assert loaded is not None
    loaded.runner.transformer.shared.embedding_VH[95] = torch.nan
    healthy, poisoned = Listener(hold=True), Listener()
    engine.submit("healthy", [1, 2, 3], GREEDY, healthy)
    assert healthy.began.wait(30.0)
    engine.submit("poisoned", [4, 95, 6], GREEDY, poisoned)
    healthy.released.set()
    end = poisoned.end()
    assert end.reason == "error"
    assert "not finite" in (end.message or "")
    assert healthy.end().reason == "length"
    assert healthy.tokens == wanted.tokens
    assert engine.healthy


def test_a_prompt_that_is_known_is_told_as_cached(engine: Engine) -> None:
    prompt = list(range(1, 41))
    first, second = Listener(), Listener()
    engine.submit("a", prompt, GREEDY, first)
    first.end()
    wait_until(lambda: engine.state().kv_blocks_cached == 2, "its full blocks are kept")
    engine.submit("b", prompt, GREEDY, second)
    second.end()
    assert (first.events[0], second.events[0]) == (Prompt(0), Prompt(32))
    assert second.tokens == first.tokens


def test_what_led_to_logits_that_are_not_finite_is_not_kept(engine: Engine) -> None:
    """A prompt of two steps, of which the first is committed, spoils what it computed."""
    loaded = engine.loader.loaded
    assert loaded is not None
    embedding_VH = loaded.runner.transformer.shared.embedding_VH
    sound = embedding_VH[95].clone()
    embedding_VH[95] = torch.nan
    prompt = [95, *range(1, 40)]
    spoilt, cured = Listener(), Listener()
    engine.submit("spoilt", prompt, GREEDY, spoilt)
    assert spoilt.end().reason == "error"
    embedding_VH[95] = sound
    engine.submit("cured", prompt, GREEDY, cured)
    assert cured.end().reason == "length"
    assert cured.events[0] == Prompt(0)


def test_stopping_ends_every_request(engine: Engine) -> None:
    listener = Listener(hold=True)
    engine.submit("a", [1, 2, 3], SamplingParams(max_tokens=200), listener)
    assert listener.began.wait(30.0)
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    listener.released.set()
    stopper.join()
    assert listener.end().reason == "error"


def test_nothing_is_admitted_before_a_plan(model: Path) -> None:
    engine = make(model)
    engine.start()
    with pytest.raises(NotAdmitting, match="Waiting") as refusal:
        engine.submit("a", [1], GREEDY, Listener())
    assert refusal.value.retry_after_seconds > 0
    state = engine.state()
    assert (state.phase, state.generation) == (WorkerPhase.WAITING, 0)
    assert state.model is not None
    assert state.model.experts == 8
    assert engine.left_group
    assert engine.healthy
    engine.stop()


def test_a_plan_that_does_not_fit_the_model_is_refused_by_name(engine: Engine) -> None:
    with pytest.raises(PlanError, match="3 layers, the model 2"):
        engine.put_plan(plan(2, contiguous(3, 8, 1, 9)))
    with pytest.raises(PlanError, match=r"layer 0: no slot holds experts \[7\]"):
        engine.put_plan(plan(2, contiguous(2, 7, 1, 9)))
    with pytest.raises(PlanError, match=r"experts \[8\], the model has 0 to 7"):
        engine.put_plan(plan(2, contiguous(2, 9, 1, 9)))
    assert engine.plan is not None
    assert engine.plan.generation == 1


def test_memory_that_does_not_suffice_fails_with_the_numbers(model: Path) -> None:
    engine = make(model, memory_bytes=1 << 20)
    engine.start()
    engine.put_plan(plan())
    wait_until(lambda: engine.state().phase is WorkerPhase.FAILED, "it has failed")
    state = engine.state()
    assert state.error_reason == "KvDoesNotFit"
    assert "1048576" in (state.last_error or "")
    assert engine.put_plan(plan(2)).refused
    assert engine.healthy, "a restart would find the same memory"
    engine.stop()


def test_a_crash_of_the_loop_is_told_to_everybody(engine: Engine) -> None:
    loaded = engine.loader.loaded
    assert loaded is not None

    def crash(*_: object) -> dict[str, int]:
        raise ZeroDivisionError("a bug")

    loaded.runner.run = crash  # type: ignore[method-assign,assignment]
    listener = Listener()
    engine.submit("a", [1, 2, 3], GREEDY, listener)
    end = listener.end()
    assert end.reason == "error"
    assert "a bug" in (end.message or "")
    wait_until(lambda: not engine.healthy, "unhealthy")
    assert engine.state().phase is WorkerPhase.FAILED
    with pytest.raises(NotAdmitting):
        engine.submit("b", [1], GREEDY, Listener())
