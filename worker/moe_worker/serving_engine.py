"""What the HTTP side asks of an engine, and nothing more.

Two real sides stand behind it: `engine.engine.Engine`, and `failed_engine.FailedEngine` for a
worker whose model can not be served. No torch here, so HTTP behaviour is tested without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moe_api.load import LoadReport
from moe_api.plan import Fence, GroupPlan
from moe_api.worker import WorkerState
from moe_worker.engine.events import EventSink
from moe_worker.engine.sampling_params import SamplingParams


class PlanAnswer(Protocol):
    """What became of a plan: refused means that it is older than the one in force."""

    @property
    def refused(self) -> bool: ...

    @property
    def in_force(self) -> Fence: ...


class ServingEngine(Protocol):
    """All methods may be called from any thread and return quickly."""

    def start(self) -> None: ...

    def stop(self) -> None:
        """End the engine thread within seconds; requests under way get `Finished("error")`."""

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: EventSink,
    ) -> None:
        """Queue one request; `on_event` is called from the engine's thread.

        Raises:
            QueueFull: too many wait already.
            NotAdmitting: draining, disrupted, or no plan yet.
        """

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step border; False when it is not known (any more)."""

    def state(self) -> WorkerState: ...

    def load(self) -> LoadReport: ...

    @property
    def plan(self) -> GroupPlan | None:
        """The plan in force."""

    def put_plan(self, plan: GroupPlan) -> PlanAnswer: ...

    def drain(self, deadline_seconds: float) -> None:
        """Admit nothing new; go on stepping with the group."""

    def read_slot(
        self, layer: int, slot: int, expert: int, generation: int, epoch: int
    ) -> bytes | None:
        """Weights of a live slot; None when it does not hold that expert under that plan."""

    @property
    def admitting(self) -> bool: ...

    @property
    def healthy(self) -> bool:
        """The loop made progress, or is idle on purpose."""

    @property
    def left_group(self) -> bool:
        """Nobody needs this process's steps: it never joined, has left, or is idle and alone."""

    @property
    def max_model_len(self) -> int: ...
