"""The worker's engine as a group of one in this process: what is measured without a server.

Everything but HTTP is as in a pod: the engine's own thread, scheduler, prefix cache, agreement of
the (one) rank, sampling, events. Neighbours: `step_log` keeps what the engine reports; `profile`
and the repository's bench/ drive it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from moe_api.plan import GroupPlan, Member, encode_layers
from moe_api.worker import KvConfig, ModelConfig, SchedulerConfig, WorkerConfig, WorkerPhase
from moe_kernels import implementation, invariance
from moe_kernels.warm_up import Report, warm_up
from moe_worker.bench.bench_error import BenchError
from moe_worker.bench.step_log import StepLog
from moe_worker.engine.engine import Engine
from moe_worker.engine.events import Event, Finished, Token
from moe_worker.engine.kernel_needs import kernel_needs
from moe_worker.engine.loading import Loaded
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.settings import EngineSettings
from moe_worker.model.config import ModelHasNoExperts, ModelUnreadable, load_architecture
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import Checkpoint

KvFormatName = Literal["auto", "fp32", "bf16", "fp8", "k8v4", "nvfp4", "mxfp4"]

RANDOM_TEMPERATURE = 1e6
"""At which every token is as likely as any other: ids are random, and drawing them is part of the
step. Greedy text of a random model repeats itself and would touch few experts."""
START_SECONDS, ANSWER_SECONDS = 300.0, 900.0
_POLL_SECONDS = 0.01
_ADDRESS, _INCARNATION, _DEVICE = "127.0.0.1", "solo", "cpu"


@dataclass(frozen=True)
class Shape:
    """What the engine is made for."""

    kv: KvFormatName = "nvfp4"
    kv_tokens: int = 8192
    """Room in the cache, beside a block a sequence."""
    max_running: int = 64
    max_batched_tokens: int = 2048
    options: dict[str, Any] = field(default_factory=dict)
    """Further fields of WorkerConfig."""

    def config(self, model: Path) -> WorkerConfig:
        block_size = KvConfig().block_size
        return WorkerConfig(
            model=ModelConfig(path=str(model), served_name=model.name),
            kv=KvConfig(dtype=self.kv, blocks=-(-self.kv_tokens // block_size) + self.max_running),
            scheduler=SchedulerConfig(
                max_running=self.max_running, max_batched_tokens=self.max_batched_tokens
            ),
            **self.options,
        )


@dataclass
class Answer:
    """A request under way, told by the engine's thread; times are those of `time.perf_counter`."""

    request_id: str
    asked_seconds: float
    tokens: list[int] = field(default_factory=list)
    first_token_seconds: float | None = None
    end: Finished | None = None
    on_end: Callable[[Answer], None] | None = None
    """Called by the engine's thread."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def take(self, event: Event) -> None:
        if isinstance(event, Token):
            if self.first_token_seconds is None:
                self.first_token_seconds = time.perf_counter()
            self.tokens.append(event.token_id)
        elif isinstance(event, Finished):
            self.end = event
            self._ended.set()
            if self.on_end is not None:
                self.on_end(self)

    def wait(self, timeout_seconds: float = ANSWER_SECONDS) -> None:
        """Until it ended.

        Raises:
            BenchError: it did not in time, or not well.
        """
        if not self._ended.wait(timeout_seconds):
            raise BenchError(f"no end of a request within {timeout_seconds:g} s")
        assert self.end is not None, "its end is kept before it is told"
        if self.end.reason == "error":
            raise BenchError(f"the engine ended a request: {self.end.message}")

    @property
    def ttft_seconds(self) -> float:
        assert self.first_token_seconds is not None, "asked for after its end"
        return self.first_token_seconds - self.asked_seconds


class SoloEngine:
    def __init__(self, model: Path, shape: Shape, log: StepLog) -> None:
        """Raises BenchError: the model cannot be read."""
        try:
            arch = load_architecture(model)
            checkpoint = Checkpoint(model, arch)
        except (ModelUnreadable, ModelHasNoExperts) as error:
            raise BenchError(f"--model {model}: {error}") from error
        settings = EngineSettings(shape.config(model), 0, _INCARNATION, token="")
        self.arch: ModelSpec = arch
        self.log = log
        self.engine = Engine(settings, arch, checkpoint, self.log)
        self._num_asked = 0

    def start(self) -> None:
        """Raises BenchError: it does not serve within `START_SECONDS`, or cannot."""
        self.engine.start()
        answer = self.engine.put_plan(plan_of_one(self.arch))
        assert not answer.refused, answer
        deadline = time.monotonic() + START_SECONDS
        while not self.engine.admitting:
            failure = self.engine.loop.failure
            if failure is not None:
                raise BenchError(f"the engine failed: {failure.message}")
            if time.monotonic() > deadline:
                phase = WorkerPhase(self.engine.state().phase).value
                raise BenchError(f"the engine is {phase} after {START_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        self.engine.stop()

    @property
    def loaded(self) -> Loaded:
        """The engine's parts; to be looked at while it rests, or by its own thread."""
        loaded = self.engine.loader.loaded
        assert loaded is not None, "asked for before it serves"
        return loaded

    def ask(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_end: Callable[[Answer], None] | None = None,
    ) -> Answer:
        """Submit a request; its events come to the answer."""
        self._num_asked += 1
        answer = Answer(f"solo-{self._num_asked}", time.perf_counter(), on_end=on_end)
        self.engine.submit(answer.request_id, prompt, params, answer.take)
        return answer

    def random_ids(self, seed: int, count: int) -> list[int]:
        rng = np.random.default_rng(seed)
        return [int(token) for token in rng.integers(0, self.arch.vocab_size, count)]


def random_answer(max_tokens: int, seed: int) -> SamplingParams:
    """So many tokens, each as likely as any other."""
    return SamplingParams(max_tokens, temperature=RANDOM_TEMPERATURE, seed=seed)


def wait_for(answers: Iterable[Answer]) -> None:
    for answer in answers:
        answer.wait()


def plan_of_one(arch: ModelSpec) -> GroupPlan:
    """All experts on one member."""
    slots_LRS = np.tile(np.arange(arch.num_experts, dtype=np.int32), (len(arch.moe_layers), 1, 1))
    member = Member(
        id=0, pod="solo", uid="solo", address=_ADDRESS, incarnation=_INCARNATION
    )  # fmt: skip
    return GroupPlan(
        namespace="default", deployment="solo", group=0, leader_epoch=1, generation=1, epoch=1,
        members=[member], layers=encode_layers(slots_LRS),
    ).sealed()  # fmt: skip


@contextmanager
def running(
    model: Path, shape: Shape, kernels: str, threads: int, report: Report, log: StepLog
) -> Iterator[SoloEngine]:
    """A warm engine that serves, until the end of the block.

    Raises:
        BenchError: it cannot; ImplementationUnavailable, UnknownImplementation: of the kernels.
    """
    batch_invariant = shape.config(model).batch_invariant
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with implementation.using(kernels, _DEVICE), invariance.using(batch_invariant):
            solo = SoloEngine(model, shape, log)
            warm_up(kernel_needs(solo.arch), report)
            try:
                solo.start()
                yield solo
            finally:
                solo.stop()
    finally:
        torch.set_num_threads(threads_before)
