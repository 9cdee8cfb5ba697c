"""Getting ready for a generation, beside whatever this worker still does in the present one.

load (the first time) → bring the experts that the plan gives to this rank and that it lacks → meet
the other members. Experts go straight into slots that the table in force leaves free; those whose
slot is still in use wait in memory until the border. Nothing of the present group is touched, so
a preparation can be called off at any time for a newer plan.

Neighbours: `loading`, `membership`; the engine asks for the result and begins the generation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moe_api.plan import GroupPlan, SlotsLRS
from moe_worker.engine.loading import Loaded, Loader
from moe_worker.engine.memory import peak_resident_bytes
from moe_worker.engine.observer import Observer, Scope
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher
from moe_worker.expert.exchange import Exchange
from moe_worker.expert.routing_table import RoutingTable
from moe_worker.membership import Cancelled, Missing, Rendezvous, RendezvousSettings
from moe_worker.model.weights import ExpertWeights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Ready:
    """All that it takes to begin the generation between two steps."""

    plan: GroupPlan
    rank: int
    slots_LRS: SlotsLRS
    loaded: Loaded
    waiting: tuple[tuple[int, int, ExpertWeights], ...]
    """(layer, slot, weights) for slots that were in use."""
    table: RoutingTable
    exchange: Exchange
    dispatcher: Dispatcher


class Preparation:
    """One plan's preparation on one rank, in a thread of its own."""

    def __init__(
        self,
        plan: GroupPlan,
        rank: int,
        loader: Loader,
        rendezvous: RendezvousSettings,
        observer: Observer,
        on_progress: Callable[[], None],
    ) -> None:
        self.plan, self.rank = plan, rank
        self._loader, self._rendezvous, self._observer = loader, rendezvous, observer
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._called_off = threading.Event()
        self._ready: Ready | None = None
        self.prepared = False
        """Weights are complete."""
        self._failed_members: set[int] = set()
        self._missing: Missing | None = None
        self._missing_since_seconds = 0.0
        self.failure: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"prepare-{plan.generation}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        return self._ready is not None

    @property
    def message(self) -> str | None:
        """What is being waited for, or what went wrong."""
        if self.failure is not None:
            return str(self.failure)
        return None if self._missing is None else self._missing.message

    def missing_members(self, now_seconds: float, grace_seconds: float) -> list[int]:
        """Who has not come for at least the grace, and everybody after a failed attempt."""
        missing = set(self._failed_members)
        if self._missing and now_seconds - self._missing_since_seconds >= grace_seconds:
            missing.update(self._missing.member_ids)
        return sorted(missing)

    def take(self) -> Ready:
        """The result, which from now on is the caller's to close."""
        with self._lock:
            ready, self._ready = self._ready, None
        assert ready is not None, "asked for before it is ready"
        return ready

    def call_off(self) -> None:
        """The plan is not wanted any more. The thread ends by itself, soon."""
        with self._lock:
            self._called_off.set()
            ready, self._ready = self._ready, None
        if ready is not None:
            ready.exchange.close()

    def _run(self) -> None:
        try:
            ready = self._prepare()
        except Cancelled:
            return
        except Exception as error:
            # Handed to the engine, which reports it: a thread has nobody above it.
            logger.exception("generation %d cannot be prepared", self.plan.generation)
            self.failure = error
            self._on_progress()
            return
        with self._lock:
            if not self._called_off.is_set():
                self._ready = ready
        if self._ready is None:
            ready.exchange.close()
        self._on_progress()

    def _prepare(self) -> Ready:
        slots_LRS = self.plan.slots()
        loaded = self._loader.load(slots_LRS)
        waiting = self._bring_experts(slots_LRS, loaded.bank)
        self._tell_memory()
        table = RoutingTable.of_plan(
            self.plan, self.rank, self._loader.arch.num_experts, loaded.bank.device
        )
        self.prepared = True
        self._on_progress()
        exchange = Rendezvous(
            self.plan, self.rank, self._rendezvous, self._loader.credentials,
            self._called_off.wait, self._report,
        ).run()  # fmt: skip
        dispatcher = Dispatcher(
            exchange, self._loader.dispatch_shape(slots_LRS.shape[2]), loaded.bank.device,
            self._observer, scopes(self.plan, self.rank),
        )  # fmt: skip
        return Ready(
            self.plan, self.rank, slots_LRS, loaded, tuple(waiting), table, exchange, dispatcher
        )

    def _bring_experts(
        self, slots_LRS: SlotsLRS, bank: ExpertBank
    ) -> list[tuple[int, int, ExpertWeights]]:
        wanted_LS, held_LS = slots_LRS[:, self.rank], bank.in_force_LS
        waiting = []
        for layer, slot in np.argwhere(wanted_LS >= 0).tolist():
            expert, is_room = int(wanted_LS[layer, slot]), slot < held_LS.shape[1]
            if is_room and held_LS[layer, slot] == expert:
                continue
            if self._called_off.is_set():
                raise Cancelled
            elsewhere = np.flatnonzero(held_LS[layer] == expert)
            if len(elsewhere):
                weights = bank.weights_at(layer, int(elsewhere[0]))
            else:
                weights = self._loader.read_expert(layer, expert)
            if is_room and held_LS[layer, slot] < 0:
                bank.write(layer, slot, weights, lambda: not self._called_off.is_set())
            else:
                waiting.append((layer, slot, weights))
        return waiting

    def _tell_memory(self) -> None:
        checkpoint, peak_bytes = self._loader.checkpoint, peak_resident_bytes()
        logger.info(
            "weights of generation %d are here: %d of the checkpoint's %d bytes were read, "
            "peak resident memory %d bytes",
            self.plan.generation, checkpoint.bytes_read, checkpoint.num_bytes, peak_bytes,
        )  # fmt: skip
        self._observer.loaded(checkpoint.bytes_read, peak_bytes)

    def _report(self, missing: Missing) -> None:
        if self._missing is None or missing.member_ids != self._missing.member_ids:
            self._missing_since_seconds = time.monotonic()
        self._missing = missing
        if missing.failed:
            self._failed_members.update(missing.member_ids)
        self._on_progress()


def scopes(plan: GroupPlan, own_rank: int) -> list[Scope]:
    """How far each rank is from this one, by the broadest topology level in use."""
    own = plan.members[own_rank].domains[:1]
    return [
        "self" if rank == own_rank else "domain" if own and member.domains[:1] == own else "remote"
        for rank, member in enumerate(plan.members)
    ]
