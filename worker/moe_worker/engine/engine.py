"""The engine of one rank: a thread that steps with its group, and the doors to it.

Outside a group it waits: for a first plan, for the others, or after a disruption for the next
generation, with sequences and KV cache kept. Plans come in through `fence`; a new generation is
prepared beside the present one and begun when all present members agree, a new epoch is staged by
the group. Requests, cache and sampling are this rank's own.

    Waiting → Loading → Joining → Serving ⇄ Disrupted
                                     └→ Draining → left

Neighbours: `group` is the loop's step, `preparation` the way into a generation, `report` the state.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan, PlanError, SlotsLRS
from moe_api.worker import WorkerPhase, WorkerState
from moe_worker.engine import fence, loading
from moe_worker.engine.events import EventSink, NotAdmitting
from moe_worker.engine.fence import Door, PlanAnswer, Verdict
from moe_worker.engine.group import Group, Tools
from moe_worker.engine.loading import Loaded
from moe_worker.engine.memory import memory_limit_bytes
from moe_worker.engine.observer import Observer, Unobserved
from moe_worker.engine.preparation import Preparation, Ready, Workshop
from moe_worker.engine.report import load_report, worker_state
from moe_worker.engine.requests import Requests
from moe_worker.engine.sequence import SamplingParams
from moe_worker.engine.sequence import Sequence as Generation
from moe_worker.engine.settings import EngineSettings
from moe_worker.expert.exchange import ExchangeFailed
from moe_worker.expert.migrate import PeerWeights
from moe_worker.expert.routing_table import check_covered
from moe_worker.membership import RendezvousSettings
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.weights import Checkpoint, ExpertWeights

logger = logging.getLogger(__name__)

RETRY_SECONDS = 2.0
_OUTSIDE_WAIT_SECONDS = 0.25
_STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Failure:
    """Why this worker cannot serve any more."""

    reason: str
    message: str
    is_crash: bool
    """A fault of the running engine, which a restart may cure; a model does not change by one."""


class Engine:
    """See `serving_engine.ServingEngine` for the doors' contract."""

    def __init__(
        self,
        settings: EngineSettings,
        arch: ModelArchitecture,
        checkpoint: Checkpoint,
        observer: Observer | None = None,
    ) -> None:
        self.settings, self.arch, self._checkpoint = settings, arch, checkpoint
        self.observer: Observer = observer or Unobserved()
        self.requests = Requests(self.observer)
        self.group: Group | None = None
        self.preparation: Preparation | None = None
        self.broken: GroupPlan | None = None
        """The plan whose generation was disrupted, until the next one begins."""
        self.suspects: list[int] = []
        self.failure: Failure | None = None
        self.last_error: str | None = None
        self.loaded: Loaded | None = None
        self.draining = False
        self._door = Door()
        self._newest: GroupPlan | None = None
        self._followed: GroupPlan | None = None
        self._left: Group | None = None
        """A group that was left in agreement, kept open until everybody must have left too."""
        self._left_seconds = 0.0
        self._door_lock, self._load_lock = threading.Lock(), threading.Lock()
        self._scheduling, self._news, self._stop = (
            threading.Lock(), threading.Event(), threading.Event(),
        )  # fmt: skip
        self._peers = PeerWeights(settings.token, settings.control_port)
        self._progress_seconds = time.monotonic()
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    # Doors: any thread.

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def submit(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        on_event: EventSink,
    ) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        assert self.loaded is not None, "a group is in force only once everything is loaded"
        seq = Generation(request_id, tuple(prompt_ids), params)
        with self._scheduling:
            self.requests.add(seq, on_event)
            try:
                self.loaded.scheduler.add(seq)
            except BaseException:
                self.requests.drop(request_id)
                raise
        self.observer.admitted(len(seq.prompt))
        self._news.set()

    def cancel(self, request_id: str) -> bool:
        known = self.requests.cancel(request_id)
        self._news.set()
        return known

    def put_plan(self, plan: GroupPlan) -> PlanAnswer:
        """Take a plan by the fencing rule.

        Raises:
            PlanError: it does not fit the model or contradicts itself; nothing is taken.
        """
        self._check(plan)
        with self._door_lock:
            stranger = fence.names_another(plan, self.settings.member, self.settings.incarnation)
            if self.failure is not None:
                return PlanAnswer(Verdict.REFUSED, self._door.fence, self.failure.message)
            if stranger is not None and self.group is None and self.broken is None:
                reason = (
                    f"the plan names incarnation {stranger} as member {self.settings.member}, "
                    f"this is {self.settings.incarnation}"
                )
                return PlanAnswer(Verdict.REFUSED, self._door.fence, reason)
            self._door, answer = fence.judge(self._door, plan)
            if answer.verdict is Verdict.TAKEN:
                self._newest = plan
        if answer.refused:
            logger.warning("plan refused: %s", answer.reason)
        self._news.set()
        return answer

    def drain(self, deadline_seconds: float) -> None:
        """Admit nothing new. What is running at the deadline is ended by the caller."""
        self.draining = True
        self._news.set()

    def read_slot(
        self, layer: int, slot: int, expert: int, generation: int, epoch: int
    ) -> bytes | None:
        group, loaded = self.group, self.loaded
        if group is None or loaded is None:
            return None
        if (group.plan.generation, group.plan.epoch) != (generation, epoch):
            return None
        return loaded.bank.read_live(layer, slot, expert)

    def state(self) -> WorkerState:
        return worker_state(self, time.monotonic())

    def load(self) -> LoadReport:
        return load_report(self, time.monotonic())

    @property
    def plan(self) -> GroupPlan | None:
        group = self.group
        return group.plan if group is not None else self.broken

    @property
    def phase(self) -> WorkerPhase:
        if self.failure is not None:
            return WorkerPhase.FAILED
        if self.draining:
            return WorkerPhase.DRAINING
        if self.group is not None:
            return WorkerPhase.SERVING
        if self.broken is not None:
            return WorkerPhase.DISRUPTED
        if self.preparation is not None:
            return WorkerPhase.JOINING if self.preparation.prepared else WorkerPhase.LOADING
        return WorkerPhase.WAITING

    @property
    def admitting(self) -> bool:
        return self._refusal() is None

    @property
    def healthy(self) -> bool:
        if self.failure is not None:
            return not self.failure.is_crash
        if self._thread.ident is None:
            return True
        recent = time.monotonic() - self._progress_seconds < self.settings.healthy_seconds
        return self._thread.is_alive() and recent

    @property
    def left_group(self) -> bool:
        return self.group is None and self._left is None

    @property
    def max_model_len(self) -> int:
        if self.loaded is not None:
            return self.loaded.max_model_len
        return self.settings.config.model.max_model_len or self.arch.max_positions

    # The engine's thread.

    def _loop(self) -> None:
        try:
            while not self._stop.is_set():
                self._progress_seconds = time.monotonic()
                self._follow_plan()
                self._end_cancelled()
                self._close_left()
                if self.group is None:
                    self._wait_outside()
                else:
                    self._step(self.group)
            self._shut_down("the worker stops")
        except Exception as error:
            logger.exception("the engine failed")
            self._fail(error, is_crash=True)

    def _follow_plan(self) -> None:
        with self._door_lock:
            newest = self._newest
        if newest is not None and newest is not self._followed:
            self._followed = newest
            self._turn_to(newest)
        preparation = self.preparation
        if preparation is None:
            return
        if preparation.failure is not None and self.loaded is None and self.failure is None:
            self._fail(preparation.failure, is_crash=False)
        elif preparation.is_ready and self.group is None:
            self._begin(preparation.take())

    def _turn_to(self, plan: GroupPlan) -> None:
        """Give up what was under way for an older plan, and begin what this one asks for."""
        self._call_off_preparation()
        rank = fence.names(plan, self.settings.member, self.settings.incarnation)
        if self.group is not None:
            if rank is not None and plan.generation == self.group.plan.generation:
                self.group.stage(plan, self._news.set)
                return
            self.group.call_off_wave()
        if rank is None:
            if self.group is None:
                self._leave("this worker is not in the plan any more")
        elif self.broken is not None and plan.generation == self.broken.generation:
            logger.warning("generation %d is broken; waiting for the next", plan.generation)
        else:
            self.preparation = Preparation(plan, rank, self._workshop())
            self.preparation.start()

    def _step(self, group: Group) -> None:
        try:
            agreement = group.step(self._generation_ready(), self._draining_level())
        except ExchangeFailed as error:
            # Its traceback holds frames that hold the process group, whose sockets would stay open.
            error.__traceback__ = None
            self._disrupt(group, error)
            return
        if group.abandoned_epoch:
            with self._door_lock:
                self._door = self._door.abandon(group.plan.generation, group.abandoned_epoch)
        if self._left is not None:
            self._left_seconds = 0.0
        if agreement.begin_generation is not None:
            self._leave_for(group, agreement.begin_generation)
        elif agreement.dissolve:
            self._part(group)
            self._leave("the group has drained")

    def _generation_ready(self) -> int:
        """The generation that this rank could begin, or be left out of, right now."""
        if self.preparation is not None:
            ready = self.preparation.is_ready
            return self.preparation.plan.generation if ready else 0
        followed, group = self._followed, self.group
        is_left_out = (
            followed is not None
            and group is not None
            and followed.generation != group.plan.generation
        )
        return followed.generation if is_left_out and followed is not None else 0

    def _draining_level(self) -> int:
        if not self.draining:
            return 0
        return 1 if len(self.requests) else 2

    def _begin(self, ready: Ready) -> None:
        self.preparation = None
        tools = Tools(
            self.settings, self.requests, self.observer, self._peers, self._read_expert,
            self._scheduling, self._news,
        )  # fmt: skip
        self.group = Group(ready, tools)
        self.broken, self.suspects = None, []
        logger.info(
            "generation %d begins with %d members", ready.plan.generation, len(ready.plan.members)
        )

    def _leave_for(self, group: Group, generation: int) -> None:
        """The group ends by agreement: on to the next generation, or out."""
        preparation = self.preparation
        self._part(group)
        if preparation is not None and preparation.plan.generation == generation:
            self._begin(preparation.take())
        else:
            self._leave("this worker is not in the plan any more")

    def _part(self, group: Group) -> None:
        """Leave a group that has agreed to end. It stays open for a moment: members may still be
        reading our last ballot."""
        group.call_off_wave()
        self.group, self._left = None, group
        self._left_seconds = time.monotonic() + _STOP_SECONDS / 10

    def _close_left(self) -> None:
        if self._left is not None and time.monotonic() >= self._left_seconds:
            self._left.close()
            self._left = None

    def _leave(self, reason: str) -> None:
        """Outside for now: what this rank was generating cannot go on without the group."""
        self.broken, self.suspects = None, []
        self._end_all(reason)

    def _disrupt(self, group: Group, error: ExchangeFailed) -> None:
        group.close()
        self.group = None
        self.broken = group.plan
        self.suspects = sorted(group.plan.members[rank].id for rank in error.suspects)
        self.last_error = str(error)
        logger.warning(
            "generation %d is disrupted by members %s: %s",
            group.plan.generation, self.suspects, error,
        )  # fmt: skip

    def _wait_outside(self) -> None:
        self._news.wait(_OUTSIDE_WAIT_SECONDS)
        self._news.clear()

    def _end_cancelled(self) -> None:
        for request_id in self.requests.take_cancelled():
            if self.loaded is not None:
                with self._scheduling:
                    self.loaded.scheduler.abort(request_id)
            self.requests.finish(request_id, "cancelled")

    def _end_all(self, message: str) -> None:
        for request_id in self.requests.ids():
            if self.loaded is not None:
                with self._scheduling:
                    self.loaded.scheduler.abort(request_id)
            self.requests.finish(request_id, "error", message)

    def _fail(self, error: Exception, is_crash: bool) -> None:
        reason = getattr(error, "reason", type(error).__name__)
        self.failure = Failure(reason, str(error) or reason, is_crash)
        self.last_error = self.failure.message
        self._shut_down(f"the worker failed: {self.failure.message}")

    def _shut_down(self, message: str) -> None:
        self._call_off_preparation()
        for group in (self.group, self._left):
            if group is not None:
                group.close()
        self.group = self._left = None
        self._end_all(message)
        self._peers.close()

    def _call_off_preparation(self) -> None:
        if self.preparation is not None:
            self.preparation.call_off()
            self.preparation = None

    # Parts.

    def _refusal(self) -> NotAdmitting | None:
        phase = self.phase
        if phase is WorkerPhase.SERVING:
            return None
        reason, message = {
            WorkerPhase.FAILED: ("failed", "this worker has failed"),
            WorkerPhase.DRAINING: ("draining", "this worker drains and takes no new requests"),
            WorkerPhase.DISRUPTED: ("disrupted", "a member of the group failed; it forms anew"),
        }.get(phase, ("starting", f"the group is not serving yet ({phase.value})"))
        return NotAdmitting(reason, message, RETRY_SECONDS)

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

    def _workshop(self) -> Workshop:
        config = self.settings.config
        credentials = (
            f"{self.arch.hidden}/{self.arch.top_k}/{self._checkpoint.dtype}/"
            f"{self.settings.tokens_per_round}"
        )
        return Workshop(
            loaded=self._load,
            read_expert=self._read_expert,
            shape=lambda num_slots: loading.dispatch_shape(
                self.arch, self._checkpoint, num_slots, self.settings.tokens_per_round
            ),
            num_experts=self.arch.num_experts,
            rendezvous=RendezvousSettings(config.operation_timeout_seconds, device=config.device),
            credentials=credentials,
            observer=self.observer,
            on_progress=self._news.set,
        )

    def _load(self, slots_LRS: SlotsLRS) -> Loaded:
        # A preparation that was called off may still be loading: its successor waits for it.
        with self._load_lock:
            if self.loaded is None:
                self.loaded = loading.load(
                    self.settings.config,
                    self.arch,
                    self._checkpoint,
                    slots_LRS,
                    self.settings.member,
                    self.settings.memory_bytes or memory_limit_bytes(),
                    self.settings.tokens_per_round,
                )
            return self.loaded

    def _read_expert(self, layer: int, expert: int) -> ExpertWeights:
        return self._checkpoint.read_expert(
            self.arch.moe_layers[layer], expert, self.settings.config.device
        )
