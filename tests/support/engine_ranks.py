"""A whole engine in a rank of the pool: started, told plans and given requests by the test.

It has the real control listener, where its peers pull weights; what the test itself asks goes
straight to the engine. Every row of logits is kept as a digest, for comparisons bit by bit.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from moe_api.load import LoadReport
from moe_api.names import CONTROL_PORT
from moe_api.plan import (
    FractionsLRS,
    GroupPlan,
    Member,
    PlanLimits,
    SlotsLRS,
    encode_layers,
)
from moe_api.worker import KvConfig, ModelConfig, SchedulerConfig, WorkerConfig, WorkerState
from moe_worker.control import control_app
from moe_worker.engine.engine import Engine
from moe_worker.engine.events import Event, Finished, Prompt, Token
from moe_worker.engine.fence import PlanAnswer
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.settings import EngineSettings
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.worker_processes import wait_until

TOKEN = "test-token"


@dataclass
class Result:
    """What one request was told, and a digest of the logits behind each of its tokens."""

    tokens: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    cached_tokens: int | None = None
    """Of the prompt; told once, before the first token."""
    finished: Finished | None = None


class Running:
    def __init__(
        self, model: Path, member: int, address: str, incarnation: str, config: dict[str, Any],
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        worker_config = WorkerConfig(
            model=ModelConfig(path=str(model), served_name="test"),
            kv=KvConfig(
                dtype=config.pop("kv", "fp32"),
                blocks=config.pop("blocks", 64),
                # Off unless asked for, so that comparisons compute everything again.
                prefix_caching=config.pop("prefix_caching", False),
            ),
            scheduler=SchedulerConfig(
                max_running=8,
                max_batched_tokens=config.pop("max_batched_tokens", 64),
                max_queued=config.pop("max_queued", 64),
            ),
            **config,
        )
        arch = load_architecture(model)
        engine_settings = EngineSettings(
            worker_config, member, incarnation, TOKEN, memory_bytes=2 << 30, **settings
        )
        self.engine = Engine(engine_settings, arch, Checkpoint(model, arch))
        self.results: dict[str, Result] = {}
        self._server = uvicorn.Server(
            uvicorn.Config(
                control_app(self.engine, TOKEN, self.engine.drain), address, CONTROL_PORT,
                log_level="error", ws="none",
            )
        )  # fmt: skip
        self._listener = threading.Thread(target=self._server.run, daemon=True)
        self._listener.start()
        wait_until(lambda: self._server.started, "the control listener")
        self.engine.start()

    def stop(self) -> None:
        self.engine.stop()
        self._server.should_exit = True
        self._listener.join(10)

    def submit(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._keep_digests()
        result = self.results[request_id] = Result()

        def on_event(event: Event) -> None:
            if isinstance(event, Prompt):
                assert (result.cached_tokens, result.tokens) == (None, []), "told once, and first"
                result.cached_tokens = event.cached_tokens
            elif isinstance(event, Token):
                assert event.index == len(result.tokens)
                result.tokens.append(event.token_id)
            else:
                assert result.finished is None, "a request ends once"
                result.finished = event

        self.engine.submit(request_id, prompt, params, on_event)

    def _keep_digests(self) -> None:
        loaded = self.engine.loader.loaded
        assert loaded is not None
        runner = loaded.runner
        if "run" in vars(runner):
            return
        run = runner.run

        def run_and_keep(schedule: Any, moe: Any) -> dict[str, int]:
            tokens = run(schedule, moe)
            assert runner.last_logits is not None
            for request_id, row in zip(tokens, runner.last_logits, strict=True):
                digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16]
                self.results[request_id].digests.append(digest)
            return tokens

        runner.run = run_and_keep  # type: ignore[method-assign]


_running: Running | None = None


def running() -> Running:
    assert _running is not None, "start comes first"
    return _running


def start(
    model: Path, member: int, address: str, incarnation: str, config: dict[str, Any] | None = None,
    **settings: Any,
) -> None:  # fmt: skip
    global _running
    stop()
    _running = Running(model, member, address, incarnation, dict(config or {}), settings)


def stop() -> None:
    global _running
    if _running is not None:
        _running.stop()
    _running = None


def put_plan(plan: GroupPlan) -> PlanAnswer:
    return running().engine.put_plan(plan)


def state() -> WorkerState:
    return running().engine.state()


def load() -> LoadReport:
    return running().engine.load()


def drain() -> None:
    running().engine.drain(30.0)


def left_group() -> bool:
    return running().engine.left_group


def submit(prompts: dict[str, Sequence[int]], max_tokens: int, temperature: float = 0.0) -> None:
    for request_id, prompt in prompts.items():
        params = SamplingParams(max_tokens, temperature=temperature, seed=sum(prompt))
        running().submit(request_id, prompt, params)


def results(request_ids: Sequence[str], timeout_seconds: float = 60.0) -> dict[str, Result]:
    """Wait for the end of these requests."""
    found = running().results
    wait_until(
        lambda: all(found[r].finished is not None for r in request_ids),
        "the requests' end", timeout_seconds,
    )  # fmt: skip
    return {request_id: found[request_id] for request_id in request_ids}


def num_tokens(request_id: str) -> int:
    return len(running().results[request_id].tokens)


def generate(
    prompts: dict[str, Sequence[int]], max_tokens: int, temperature: float = 0.0
) -> dict[str, Result]:
    submit(prompts, max_tokens, temperature)
    return results(list(prompts))


def check_slots() -> None:
    """Every slot that the table in force names holds that expert as the checkpoint has it."""
    engine = running().engine
    assert engine.loader.loaded is not None
    bank = engine.loader.loaded.bank
    for layer, slot in np.argwhere(bank.in_force_LS >= 0).tolist():
        weights = engine.loader.read_expert(layer, int(bank.in_force_LS[layer, slot]))
        assert bool((bank.w13_LS2IH[layer][slot] == weights.w13_2IH).all()), (layer, slot)
        assert bool((bank.w2_LSHI[layer][slot] == weights.w2_HI).all()), (layer, slot)


def checkpoint_bytes() -> tuple[int, int]:
    """Read until now, and in all."""
    checkpoint = running().engine.loader.checkpoint
    return checkpoint.bytes_read, checkpoint.num_bytes


def refuse_pulls() -> None:
    """Answer peers as a rank does whose slots have changed meanwhile."""
    running().engine.read_slot = lambda *args, **kwargs: None  # type: ignore[method-assign]


def rebalance_every_step(plans: Sequence[GroupPlan]) -> None:
    """From now on stage the next of these plans before every step, and wait until it is complete:
    with every rank doing so, every step begins with a switch."""
    group = running().engine.loop.group
    assert group is not None
    remaining = list(plans)
    step = group.step

    def step_with_switch(generation_ready: int, draining: int) -> Any:
        if remaining and running().engine.loop.tools.requests and group.wave is None:
            group.stage(remaining.pop(0), lambda: None)
            wave = group.wave
            assert wave is not None
            wait_until(lambda: wave.complete or wave.error, "the wave")
            assert wave.error is None, wave.error
        agreement = step(generation_ready, draining)
        if agreement.switch_to is not None:
            check_slots()
            switches.append(agreement.switch_to)
        return agreement

    switches.clear()
    group.step = step_with_switch  # type: ignore[method-assign]


switches: list[int] = []


def num_switches() -> int:
    return len(switches)


@dataclass
class Operator:
    """Makes the plans of one group, with growing numbers."""

    addresses: Sequence[str]
    """Of members 0, 1, …"""
    generation: int = 0
    epoch: int = 0
    leader_epoch: int = 1
    incarnations: dict[int, str] = field(default_factory=dict)
    limits: PlanLimits = field(default_factory=PlanLimits)

    def form(self, member_ids: Sequence[int], slots_LRS: SlotsLRS) -> GroupPlan:
        """A new generation."""
        self.generation += 1
        return self._plan(member_ids, slots_LRS)

    def rebalance(
        self, plan: GroupPlan, slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS | None = None
    ) -> GroupPlan:
        """The next epoch for the same members; absent fractions are an even split."""
        return self._plan([member.id for member in plan.members], slots_LRS, fractions_LRS)

    def _plan(
        self,
        member_ids: Sequence[int],
        slots_LRS: SlotsLRS,
        fractions_LRS: FractionsLRS | None = None,
    ) -> GroupPlan:
        self.epoch += 1
        members = [
            Member(id=i, pod=f"pod-{i}", uid=f"uid-{i}", address=self.addresses[i],
                   incarnation=self.incarnations.get(i, f"inc-{i}"))
            for i in member_ids
        ]  # fmt: skip
        return GroupPlan(
            namespace="test", deployment="test", group=0, leader_epoch=self.leader_epoch,
            generation=self.generation, epoch=self.epoch, members=members,
            layers=encode_layers(slots_LRS, fractions_LRS), limits=self.limits,
        ).sealed()  # fmt: skip


def now() -> float:
    return time.monotonic()
