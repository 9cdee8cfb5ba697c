"""Stands where the engine would be when the model can not be served: says why, and takes nothing.

The process stays up so that the operator can read the reason over the control API instead of
guessing it from a crash.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from moe_api.load import LoadReport
from moe_api.plan import Fence, GroupPlan
from moe_api.worker import WorkerPhase, WorkerState
from moe_worker.engine.events import EventSink, NotAdmitting
from moe_worker.engine.sampling_params import SamplingParams

RETRY_SECONDS = 60.0


@dataclass(frozen=True)
class RefusedPlan:
    """A worker without a model refuses every plan."""

    in_force: Fence
    refused: bool = True


class FailedEngine:
    """The `ServingEngine` of a worker that can not serve its model.

    `reason` is machine-readable (ModelUnreadable, ModelHasNoExperts), `message` for people.
    """

    def __init__(self, incarnation: str, member: int, reason: str, message: str) -> None:
        self._incarnation = incarnation
        self._member = member
        self._reason = reason
        self._message = message

    plan: GroupPlan | None = None
    admitting = False
    healthy = True
    """A restart would read the same model again."""
    left_group = True
    max_model_len = 0

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def drain(self, deadline_seconds: float) -> None: ...

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: EventSink,
    ) -> NoReturn:
        raise NotAdmitting(self._reason, self._message, RETRY_SECONDS)

    def cancel(self, request_id: str) -> bool:
        return False

    def state(self) -> WorkerState:
        return WorkerState(
            incarnation=self._incarnation,
            member=self._member,
            phase=WorkerPhase.FAILED,
            last_error=self._message,
            error_reason=self._reason,
        )

    def load(self) -> LoadReport:
        return LoadReport(
            incarnation=self._incarnation,
            member=self._member,
            generation=0,
            epoch=0,
            monotonic_seconds=time.monotonic(),
            routed=[],
            served=[],
        )

    def put_plan(self, plan: GroupPlan) -> RefusedPlan:
        return RefusedPlan(in_force=Fence(0, 0, 0))

    def read_slot(
        self, layer: int, slot: int, expert: int, generation: int, epoch: int
    ) -> bytes | None:
        return None
