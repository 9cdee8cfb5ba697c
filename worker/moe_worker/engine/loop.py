"""The engine's thread: where this worker stands, from its first plan to its last step.

    Waiting → Loading → Joining → Serving ⇄ Disrupted
                                     └→ Draining → left

Outside a group it waits: for a first plan, for the others, or after a disruption for the next
generation, with sequences and KV cache kept. A new generation is prepared beside the present one
and begun when all present members agree; a new epoch is the group's own affair. Requests, cache
and sampling are this rank's own.

Neighbours: `engine` hands plans and requests in, `preparation` is the way into a generation,
`group` the steps in it.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from moe_api.plan import GroupPlan
from moe_api.worker import WorkerPhase
from moe_worker.engine import fence
from moe_worker.engine.group import Group, Tools
from moe_worker.engine.loading import Loader
from moe_worker.engine.observer import Observer
from moe_worker.engine.preparation import Preparation, Ready
from moe_worker.engine.requests import Requests
from moe_worker.engine.settings import EngineSettings
from moe_worker.expert.exchange import ExchangeFailed
from moe_worker.expert.migrate import PeerWeights
from moe_worker.membership import RendezvousSettings

logger = logging.getLogger(__name__)

_OUTSIDE_WAIT_SECONDS = 0.25
_LINGER_SECONDS = 1.0
"""A group that was left in agreement stays open so long: members may still read our last ballot."""


@dataclass(frozen=True)
class Failure:
    """Why this worker cannot serve any more."""

    reason: str
    message: str
    is_crash: bool
    """A fault of the running engine, which a restart may cure; a model does not change by one."""


class EngineLoop:
    """Its fields are read from other threads and written by the loop alone, but for `newest_plan`
    and `draining`, which come from outside."""

    def __init__(self, settings: EngineSettings, loader: Loader, observer: Observer) -> None:
        self.newest_plan: GroupPlan | None = None
        self.draining = False
        self.group: Group | None = None
        self.preparation: Preparation | None = None
        self.broken: GroupPlan | None = None
        """The plan whose generation was disrupted, until the next one begins."""
        self.suspects: list[int] = []
        self.failure: Failure | None = None
        self.last_error: str | None = None
        self.progress_seconds = time.monotonic()
        self.tools = Tools(
            settings=settings,
            requests=Requests(observer),
            observer=observer,
            peers=PeerWeights(settings.token, settings.control_port),
            loader=loader,
            scheduling=threading.Lock(),
            news=threading.Event(),
        )
        self._settings, self._loader, self._requests = settings, loader, self.tools.requests
        self._followed: GroupPlan | None = None
        self._left: Group | None = None
        self._left_seconds = 0.0
        self._stop = threading.Event()

    @property
    def phase(self) -> WorkerPhase:
        preparation = self.preparation
        if self.failure is not None:
            return WorkerPhase.FAILED
        if self.draining:
            return WorkerPhase.DRAINING
        if self.group is not None:
            return WorkerPhase.SERVING
        if self.broken is not None:
            return WorkerPhase.DISRUPTED
        if preparation is not None:
            return WorkerPhase.JOINING if preparation.prepared else WorkerPhase.LOADING
        return WorkerPhase.WAITING

    @property
    def is_outside(self) -> bool:
        """Nobody needs this rank's steps."""
        return self.group is None and self._left is None

    def stop(self) -> None:
        self._stop.set()
        self.tools.news.set()

    def run(self) -> None:
        try:
            while not self._stop.is_set():
                self.progress_seconds = time.monotonic()
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
        newest = self.newest_plan
        if newest is not None and newest is not self._followed:
            self._followed = newest
            self._turn_to(newest)
        preparation = self.preparation
        if preparation is None:
            return
        if preparation.failure is not None and self._loader.loaded is None:
            self._fail(preparation.failure, is_crash=False)
        elif preparation.is_ready and self.group is None:
            self._begin(preparation.take())

    def _turn_to(self, plan: GroupPlan) -> None:
        """Give up what was under way for an older plan, and begin what this one asks for."""
        self._call_off_preparation()
        rank = fence.names(plan, self._settings.member, self._settings.incarnation)
        if self.group is not None:
            if rank is not None and plan.generation == self.group.plan.generation:
                self.group.stage(plan, self.tools.news.set)
                return
            self.group.call_off_wave()
        if rank is None:
            if self.group is None:
                self._stay_outside("this worker is not in the plan any more")
        elif self.broken is not None and plan.generation == self.broken.generation:
            logger.warning("generation %d is broken; waiting for the next", plan.generation)
        else:
            config = self._settings.config
            rendezvous = RendezvousSettings(
                config.operation_timeout_seconds, self._settings.token, config.carrier
            )
            self.preparation = Preparation(
                plan, rank, self._loader, rendezvous, self.tools.observer, self.tools.news.set
            )
            self.preparation.start()

    def _step(self, group: Group) -> None:
        try:
            agreement = group.step(self._generation_ready(group), self._draining_level())
        except ExchangeFailed as error:
            # Its traceback's frames hold the process group, whose sockets would stay open.
            error.__traceback__ = None
            self._disrupt(group, error)
            return
        if agreement.begin_generation is not None:
            self._leave_for(group, agreement.begin_generation)
        elif agreement.dissolve:
            self._part(group)
            self._stay_outside("the group has drained")

    def _generation_ready(self, group: Group) -> int:
        """The generation that this rank could begin, or be left out of, right now."""
        preparation, followed = self.preparation, self._followed
        if preparation is not None:
            return preparation.plan.generation if preparation.is_ready else 0
        if followed is not None and followed.generation != group.plan.generation:
            return followed.generation
        return 0

    def _draining_level(self) -> int:
        if not self.draining:
            return 0
        return 1 if len(self._requests) else 2

    def _begin(self, ready: Ready) -> None:
        """One assignment puts the next generation in the place of the present one: there is no
        moment in which this rank does not serve."""
        self.group = Group(ready, self.tools)
        self.preparation, self.broken, self.suspects = None, None, []
        logger.info(
            "generation %d begins with %d members", ready.plan.generation, len(ready.plan.members)
        )

    def _leave_for(self, group: Group, generation: int) -> None:
        """The group ends by agreement: on to the next generation, or out."""
        preparation = self.preparation
        self._linger(group)
        if preparation is not None and preparation.plan.generation == generation:
            self._begin(preparation.take())
        else:
            self.group = None
            self._stay_outside("this worker is not in the plan any more")

    def _part(self, group: Group) -> None:
        self._linger(group)
        self.group = None

    def _linger(self, group: Group) -> None:
        group.call_off_wave()
        self._left, self._left_seconds = group, time.monotonic() + _LINGER_SECONDS

    def _close_left(self) -> None:
        if self._left is not None and time.monotonic() >= self._left_seconds:
            self._left.close()
            self._left = None

    def _stay_outside(self, reason: str) -> None:
        """What this rank was generating cannot go on without a group."""
        self.broken, self.suspects = None, []
        self._end_all(reason)

    def _disrupt(self, group: Group, error: ExchangeFailed) -> None:
        group.close()
        self.broken = group.plan
        self.suspects = sorted(group.plan.members[rank].id for rank in error.suspects)
        self.last_error = str(error)
        self.group = None
        logger.warning(
            "generation %d is disrupted by members %s: %s",
            group.plan.generation,
            self.suspects,
            error,
        )

    def _wait_outside(self) -> None:
        self.tools.news.wait(_OUTSIDE_WAIT_SECONDS)
        self.tools.news.clear()

    def _end_cancelled(self) -> None:
        for request_id in self._requests.take_cancelled():
            self._forget(request_id)
            self._requests.finish(request_id, "cancelled")

    def _end_all(self, message: str) -> None:
        for request_id in self._requests.ids():
            self._forget(request_id)
            self._requests.finish(request_id, "error", message)

    def _forget(self, request_id: str) -> None:
        loaded = self._loader.loaded
        assert loaded is not None, "requests are taken only in a group"
        with self.tools.scheduling:
            loaded.scheduler.abort(request_id)

    def _fail(self, error: Exception, is_crash: bool) -> None:
        reason = str(getattr(error, "reason", type(error).__name__))
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
        self.tools.peers.close()

    def _call_off_preparation(self) -> None:
        if self.preparation is not None:
            self.preparation.call_off()
            self.preparation = None
