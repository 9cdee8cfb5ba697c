"""An engine without a model: the same interface, events and thread, but scripted tokens and pace.

Lets HTTP behaviour be tested in milliseconds and held at any point: `hold()` stops the steps,
`step(n)` allows n of them, `release()` lets them run freely.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from moe_api.load import LoadReport
from moe_api.plan import Fence, GroupPlan
from moe_api.worker import WorkerPhase, WorkerState
from moe_worker.engine.events import (
    EventSink,
    Finished,
    FinishReason,
    NotAdmitting,
    Prompt,
    Token,
    TokenLogprobs,
)
from moe_worker.engine.observer import Observer, Unobserved
from moe_worker.engine.sampling_params import Grammar, SamplingParams
from moe_worker.engine.scheduler import QueueFull

Script = Callable[[Sequence[int]], Iterable[int]]
"""Prompt → tokens, in order; when they run out the request ends as if a stop token came. A request
with a grammar gets tokens that it allows instead, drawn with the request's seed."""
CACHED_TOKENS = 1


@dataclass
class _Request:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    on_event: EventSink
    tokens: Iterator[int]
    num_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    refused: bool
    in_force: Fence


class FakeEngine:
    def __init__(
        self,
        script: Script,
        *,
        max_running: int = 64,
        max_queued: int = 64,
        max_model_len: int = 256,
        observer: Observer | None = None,
        step_seconds: float = 0.0,
    ) -> None:
        self.script = script
        self.max_model_len = max_model_len
        self.plan: GroupPlan | None = None
        self.phase = WorkerPhase.SERVING
        self.healthy = True
        self.left_group = True
        self.drains: list[float] = []
        self.submitted: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.cancelled: list[str] = []
        self.slots: dict[tuple[int, int, int], bytes] = {}
        """(layer, slot, expert) → bytes"""
        self.stopped = False
        self._observer = observer or Unobserved()
        self._max_running, self._max_queued = max_running, max_queued
        self._step_seconds = step_seconds
        self._waiting: deque[_Request] = deque()
        self._running: list[_Request] = []
        self._allowed_steps: float = float("inf")
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._loop, name="fake-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._changed:
            self.stopped = True
            for request in [*self._running, *self._waiting]:
                self._finish(request, "error", "the engine was stopped")
            self._running.clear()
            self._waiting.clear()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(10)

    def hold(self) -> None:
        with self._changed:
            self._allowed_steps = 0

    def step(self, num_steps: int = 1) -> None:
        with self._changed:
            self._allowed_steps += num_steps
            self._changed.notify_all()

    def release(self) -> None:
        self.step(10**9)

    @property
    def admitting(self) -> bool:
        return self.phase is WorkerPhase.SERVING

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: EventSink,
    ) -> None:
        with self._changed:
            if not self.admitting:
                raise NotAdmitting(self.phase, f"its phase is {self.phase}", 3.0)
            if len(self._running) == self._max_running and len(self._waiting) >= self._max_queued:
                raise QueueFull(self._max_queued, 2.0)
            if params.grammar is None:
                tokens = iter(self.script(prompt_ids))
            else:
                tokens = following(params.grammar, params)
            self._waiting.append(_Request(request_id, tuple(prompt_ids), params, on_event, tokens))
            self.submitted.append((tuple(prompt_ids), params))
            self._observer.admitted(len(prompt_ids))
            self._admit()
            self._changed.notify_all()

    def cancel(self, request_id: str) -> bool:
        with self._changed:
            for requests in (self._running, self._waiting):
                for request in list(requests):
                    if request.request_id == request_id:
                        requests.remove(request)
                        self.cancelled.append(request_id)
                        self._finish(request, "cancelled")
                        self._admit()
                        return True
            return False

    def fail_all(self, message: str) -> None:
        """As after a step that can not be repaired."""
        with self._changed:
            for request in self._running:
                self._finish(request, "error", message)
            self._running.clear()

    def state(self) -> WorkerState:
        fence = self._fence()
        return WorkerState(
            incarnation="fake",
            member=0,
            phase=self.phase,
            generation=fence.generation,
            applied_epoch=fence.epoch,
            staged_epoch=fence.epoch,
            slots="0,1,-1|1,0,-1",
            requests_running=len(self._running),
            requests_waiting=len(self._waiting),
            kv_blocks_used=2 * len(self._running),
            kv_blocks_total=100,
        )

    def load(self) -> LoadReport:
        fence = self._fence()
        return LoadReport(
            incarnation="fake",
            member=0,
            generation=fence.generation,
            epoch=fence.epoch,
            monotonic_seconds=time.monotonic(),
            routed=[[3, 4], [5, 2]],
            served=[[3, 4, 0], [2, 5, 0]],
        )

    def put_plan(self, plan: GroupPlan) -> Answer:
        plan.slots()
        if self.plan is not None and plan.fence < self.plan.fence:
            return Answer(True, self._fence())
        self.plan = plan
        return Answer(False, self._fence())

    def drain(self, deadline_seconds: float) -> None:
        self.drains.append(deadline_seconds)
        self.phase = WorkerPhase.DRAINING

    def read_slot(
        self, layer: int, slot: int, expert: int, generation: int, epoch: int
    ) -> bytes | None:
        if (generation, epoch) != (self._fence().generation, self._fence().epoch):
            return None
        return self.slots.get((layer, slot, expert))

    def _fence(self) -> Fence:
        return Fence(0, 0, 0) if self.plan is None else self.plan.fence

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self.stopped or (self._running and self._allowed_steps >= 1)
                )
                if self.stopped:
                    return
                self._allowed_steps -= 1
                self._run_step()
            if self._step_seconds:
                time.sleep(self._step_seconds)

    def _run_step(self) -> None:
        for request in list(self._running):
            if not request.num_tokens:
                request.on_event(Prompt(CACHED_TOKENS, prompt_logprobs(request)))
            token = next(request.tokens, None)
            if token is None or token in request.params.stop_token_ids:
                self._end(request, "stop")
                continue
            told = logprobs_of(token, request.params.num_logprobs)
            request.on_event(Token(token, request.num_tokens, told))
            request.num_tokens += 1
            self._observer.generated(1)
            if request.num_tokens == request.params.max_tokens:
                self._end(request, "length")

    def _end(self, request: _Request, reason: FinishReason) -> None:
        self._running.remove(request)
        self._finish(request, reason)
        self._admit()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())

    def _finish(self, request: _Request, reason: FinishReason, message: str | None = None) -> None:
        request.on_event(Finished(reason, message, len(request.prompt), request.num_tokens))
        self._observer.finished(reason)


def following(grammar: Grammar, params: SamplingParams) -> Iterator[int]:
    """Any answer that the grammar allows; ends when it may."""
    draw = random.Random(params.seed)
    output: list[int] = []
    while True:
        allowed = np.flatnonzero(grammar.allowed(output)).tolist()
        ends = [token for token in allowed if token in params.stop_token_ids]
        output.append(draw.choice(ends or allowed))
        yield output[-1]


def logprobs_of(token: int, count: int | None) -> TokenLogprobs | None:
    """The token itself is certain, all others are impossible."""
    if count is None:
        return None
    others = [other for other in range(count + 1) if other != token]
    ranked = [(token, 0.0), *((other, -math.inf) for other in others)]
    return TokenLogprobs(token, 0.0, tuple(ranked[:count]))


def prompt_logprobs(request: _Request) -> tuple[TokenLogprobs, ...]:
    told = [logprobs_of(token, request.params.prompt_logprobs) for token in request.prompt[1:]]
    return tuple(entry for entry in told if entry is not None)
