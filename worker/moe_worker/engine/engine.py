"""The engine of one rank: its doors, used from any thread. `serving_engine` is their contract.

Plans come in through `fence`, requests through the scheduler's queue; what becomes of them is the
loop's business, which runs in a thread of its own.

Neighbours: `loop` is that thread, `report` what is told about it, `loading` what it allocates.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan, PlanError
from moe_api.worker import WorkerPhase, WorkerState
from moe_worker.engine import fence
from moe_worker.engine.events import EventSink, NotAdmitting
from moe_worker.engine.fence import Door, PlanAnswer, Verdict
from moe_worker.engine.kernel_needs import kernel_needs
from moe_worker.engine.loading import Loader
from moe_worker.engine.loop import EngineLoop
from moe_worker.engine.observer import Observer, Unobserved
from moe_worker.engine.report import load_report, worker_state
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence as Generation
from moe_worker.engine.settings import EngineSettings
from moe_worker.engine.warm_up import WarmUp
from moe_worker.expert.routing_table import check_covered
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import Checkpoint

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
_STOP_SECONDS = 10.0
_REFUSALS = {
    WorkerPhase.FAILED: ("failed", "this worker has failed"),
    WorkerPhase.DRAINING: ("draining", "this worker drains and takes no new requests"),
    WorkerPhase.DISRUPTED: ("disrupted", "a member of the group failed; it forms anew"),
}


class Engine:
    """Nothing is loaded before the first plan; `start` comes before everything else."""

    def __init__(
        self,
        settings: EngineSettings,
        arch: ModelSpec,
        checkpoint: Checkpoint,
        observer: Observer | None = None,
    ) -> None:
        self.settings, self.arch = settings, arch
        self.observer: Observer = observer or Unobserved()
        self.warm_up = WarmUp(kernel_needs(arch, settings.config.kv), self.observer)
        self.loader = Loader(settings, arch, checkpoint, self.warm_up)
        self.loop = EngineLoop(settings, self.loader, self.observer)
        self._door, self._door_lock = Door(), threading.Lock()
        self._thread = threading.Thread(target=self.loop.run, name="engine", daemon=True)

    def start(self) -> None:
        self.warm_up.start()
        self._thread.start()

    def stop(self) -> None:
        self.loop.stop()
        self.warm_up.stop()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: EventSink,
    ) -> None:
        refusal, loaded, tools = self._refusal(), self.loader.loaded, self.loop.tools
        if refusal is not None:
            raise refusal
        assert loaded is not None, "a group is in force only once everything is loaded"
        seq = Generation(request_id, tuple(prompt_ids), params)
        with tools.scheduling:
            tools.requests.add(seq, on_event)
            try:
                loaded.scheduler.add(seq)
            except BaseException:
                tools.requests.drop(request_id)
                raise
        self.observer.admitted(len(seq.prompt))
        tools.news.set()

    def cancel(self, request_id: str) -> bool:
        known = self.loop.tools.requests.cancel(request_id)
        self.loop.tools.news.set()
        return known

    def put_plan(self, plan: GroupPlan) -> PlanAnswer:
        """Take a plan by the fencing rule.

        Raises:
            PlanError: it does not fit the model or contradicts itself; nothing is taken.
        """
        self._check(plan)
        with self._door_lock:
            answer = self._refused_by_identity(plan)
            if answer is None:
                self._door, answer = fence.judge(self._door_now(), plan)
            if answer.verdict is Verdict.TAKEN:
                self.loop.newest_plan = plan
        if answer.refused:
            logger.warning("plan refused: %s", answer.reason)
        self.loop.tools.news.set()
        return answer

    def drain(self, deadline_seconds: float) -> None:
        """Admit nothing new. What still runs at the deadline is ended by the caller."""
        self.loop.draining = True
        self.loop.tools.news.set()

    def read_slot(
        self, layer: int, slot: int, expert: int, generation: int, epoch: int
    ) -> bytes | None:
        group, loaded = self.loop.group, self.loader.loaded
        if group is None or loaded is None:
            return None
        if (group.plan.generation, group.plan.epoch) != (generation, epoch):
            return None
        return loaded.bank.read_live(layer, slot, expert)

    def state(self) -> WorkerState:
        progress = self.warm_up.progress
        return worker_state(self.settings, self.loop, progress, time.monotonic())

    def load(self) -> LoadReport:
        return load_report(self.settings, self.loop, time.monotonic())

    @property
    def plan(self) -> GroupPlan | None:
        group = self.loop.group
        return group.plan if group is not None else self.loop.broken

    @property
    def admitting(self) -> bool:
        return self._refusal() is None

    @property
    def healthy(self) -> bool:
        failure = self.loop.failure
        if failure is not None:
            return not failure.is_crash
        if self._thread.ident is None:
            return True
        pause = time.monotonic() - self.loop.progress_seconds
        return self._thread.is_alive() and pause < self.settings.healthy_seconds

    @property
    def left_group(self) -> bool:
        return self.loop.is_outside

    @property
    def max_model_len(self) -> int:
        loaded = self.loader.loaded
        if loaded is not None:
            return loaded.max_model_len
        return self.settings.config.model.max_model_len or self.arch.max_positions

    def _refusal(self) -> NotAdmitting | None:
        phase = self.loop.phase
        if phase is WorkerPhase.SERVING:
            return None
        starting = ("starting", f"the group does not serve yet (phase {phase.value})")
        reason, message = _REFUSALS.get(phase, starting)
        return NotAdmitting(reason, message, RETRY_SECONDS)

    def _door_now(self) -> Door:
        """The door with what the group has abandoned."""
        group = self.loop.group
        if group is None or not group.abandoned_epoch:
            return self._door
        return self._door.abandon(group.plan.generation, group.abandoned_epoch)

    def _refused_by_identity(self, plan: GroupPlan) -> PlanAnswer | None:
        """A worker outside any group takes no plan that has another in its place; one in a group
        learns from such a plan that it is to leave."""
        loop, settings = self.loop, self.settings
        if loop.failure is not None:
            return PlanAnswer(Verdict.REFUSED, self._door.fence, loop.failure.message)
        other = fence.names_another(plan, settings.member, settings.incarnation)
        if other is None or loop.group is not None or loop.broken is not None:
            return None
        reason = (
            f"the plan names incarnation {other} as member {settings.member}, "
            f"this is {settings.incarnation}"
        )
        return PlanAnswer(Verdict.REFUSED, self._door.fence, reason)

    def _check(self, plan: GroupPlan) -> None:
        ids = [member.id for member in plan.members]
        if len(set(ids)) != len(ids):
            raise PlanError(f"members {ids} are not all different")
        if len(plan.layers) != len(self.arch.moe_layers):
            raise PlanError(
                f"the plan has {len(plan.layers)} layers, the model {len(self.arch.moe_layers)}"
            )
        plan.fractions()
        try:
            check_covered(plan.slots(), self.arch.num_experts)
        except ValueError as error:
            raise PlanError(str(error)) from error
