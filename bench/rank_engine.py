"""What a process does in `bench/ranks.py`: it is one rank's whole engine and times its steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_api.plan import GroupPlan
from moe_api.worker import KvConfig, ModelConfig, SchedulerConfig, WorkerConfig, WorkerPhase
from moe_worker.engine.engine import Engine
from moe_worker.engine.events import Event, Finished, Token
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.settings import EngineSettings
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint

_engines: dict[str, Engine] = {}
_SECONDS_TO_SERVE = 300.0
_MEMORY_BYTES = 4 << 30
STEPS_BEFORE = 3
"""Of each end of a run, in which some requests may not run: not counted."""


@dataclass(frozen=True)
class Decoded:
    seconds: list[float]
    """Of the steps in which all requests ran."""
    cpu_seconds: float
    """Of all threads of this process, from the first token to the last."""
    tokens: dict[str, list[int]]


def serve(name: str, plan: GroupPlan, rank: int, model: Path, threads: int, most: int) -> None:
    """Be the engine `name` in this plan, and wait until it serves."""
    torch.set_num_threads(threads)
    config = WorkerConfig(
        model=ModelConfig(path=str(model), served_name="bench"),
        kv=KvConfig(dtype="nvfp4", blocks=32 * most),
        scheduler=SchedulerConfig(max_running=most, max_batched_tokens=2048),
    )
    # An idle group must not disturb the one that is measured.
    settings = EngineSettings(
        config, rank, plan.members[rank].incarnation, "bench", memory_bytes=_MEMORY_BYTES,
        idle_poll_seconds=0.05,
    )  # fmt: skip
    arch = load_architecture(model)
    engine = _engines[name] = Engine(settings, arch, Checkpoint(model, arch))
    engine.start()
    answer = engine.put_plan(plan)
    assert not answer.refused, answer.reason
    deadline = time.monotonic() + _SECONDS_TO_SERVE
    while engine.state().phase is not WorkerPhase.SERVING:
        assert engine.state().phase is not WorkerPhase.FAILED, engine.state()
        assert time.monotonic() < deadline, f"does not serve: {engine.state()}"
        time.sleep(0.05)


def decode(name: str, prompts: Mapping[str, Sequence[int]], num_tokens: int) -> Decoded:
    """Run these requests together, each to so many tokens."""
    engine = _engines[name]
    tokens: dict[str, list[int]] = {request: [] for request in prompts}
    running, over = set(prompts), threading.Event()
    ends: list[float] = []
    cpu_marks: list[float] = []
    last = next(reversed(list(prompts)))

    def listener(request: str) -> None:
        def on_event(event: Event) -> None:
            if isinstance(event, Token):
                tokens[request].append(event.token_id)
                if request == last:
                    ends.append(time.perf_counter())
                    cpu_marks.append(time.process_time())
            elif isinstance(event, Finished):
                assert event.reason == "length", event
                running.discard(request)
                if not running:
                    over.set()

        params = SamplingParams(num_tokens, temperature=1.0, seed=sum(prompts[request]))
        engine.submit(request, prompts[request], params, on_event)

    for request in prompts:
        listener(request)
    assert over.wait(_SECONDS_TO_SERVE), f"requests are still running: {sorted(running)[:3]}"
    first, final = STEPS_BEFORE, len(ends) - STEPS_BEFORE
    seconds = [later - sooner for sooner, later in zip(ends[first:], ends[first + 1 : final],
                                                       strict=False)]  # fmt: skip
    cpu_seconds = (cpu_marks[final - 1] - cpu_marks[first]) / len(seconds)
    return Decoded(seconds, cpu_seconds, tokens)


def stop() -> None:
    for engine in _engines.values():
        engine.stop()
    _engines.clear()
