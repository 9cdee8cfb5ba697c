"""Workers without a model: each speaks the real control protocol on a loopback address of its own.

A `Fleet` holds the workers of a test and plays their group: a plan comes into force when every
member that it names has it, a killed member leaves the others disrupted. Nothing happens by time:
what a worker says changes when it is asked, so passes of the operator are the only clock.
"""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass, field

import numpy as np

from moe_api import names
from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from moe_api.worker import MigrationState, ModelShape, WorkerPhase, WorkerState

SHAPE = ModelShape(layers=2, experts=6, top_k=2, bytes_per_expert=1000, kv_bytes_per_token=10)
ADMITTING = (WorkerPhase.SERVING,)


@dataclass(eq=False)
class FakeWorker:
    """One worker process; public fields are what a test may set."""

    address: str
    token: str
    member: int
    incarnation: str
    shape: ModelShape | None = SHAPE
    phase: WorkerPhase = WorkerPhase.WAITING
    error_reason: str | None = None
    last_error: str | None = None
    plan: GroupPlan | None = None
    """Newest plan that it was told."""
    generation: int = 0
    applied_epoch: int = 0
    abandoned_epoch: int = 0
    slots_LRS: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), dtype=np.int32))
    """Placement that it runs, of all ranks."""
    fractions_LRS: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0)))
    rank: int = 0
    suspects: list[int] = field(default_factory=list)
    running: int = 0
    draining: bool = False
    hung: bool = False
    """Takes connections and never answers."""
    migration: MigrationState | None = None
    routed_LE: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    served_LS: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))
    plans_heard: int = 0

    def state(self) -> WorkerState:
        return WorkerState(
            incarnation=self.incarnation,
            member=self.member,
            phase=self.phase,
            model=self.shape,
            generation=self.generation,
            applied_epoch=self.applied_epoch,
            staged_epoch=self.applied_epoch,
            abandoned_epoch=self.abandoned_epoch,
            prepared_generation=self.generation,
            migration=self.migration,
            suspects=self.suspects,
            requests_running=self.running,
            last_error=self.last_error,
            error_reason=self.error_reason,
        )

    def load(self) -> LoadReport:
        return LoadReport(
            incarnation=self.incarnation,
            member=self.member,
            generation=self.generation,
            epoch=self.applied_epoch,
            monotonic_seconds=0.0,
            routed=self.routed_LE.astype(int).tolist(),
            served=self.served_LS.astype(int).tolist(),
        )


class Fleet:
    """All fake workers of a test; use as a context manager."""

    def __init__(self, token: str = "") -> None:
        self.token = token
        self.workers: dict[str, FakeWorker] = {}
        """By incarnation."""
        self.switching = True
        """Whether waves are switched; False leaves a new epoch of a generation under way."""
        self._servers: dict[str, http.server.ThreadingHTTPServer] = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for incarnation in list(self.workers):
            self.kill(incarnation)

    def start(self, address: str, member: int, incarnation: str) -> FakeWorker:
        worker = FakeWorker(address, self.token, member, incarnation)
        server = http.server.ThreadingHTTPServer(
            (address, names.CONTROL_PORT), _handler(self, worker)
        )
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        with self._lock:
            self.workers[incarnation], self._servers[incarnation] = worker, server
        return worker

    def kill(self, incarnation: str) -> None:
        """The process is gone: its group breaks, the others suspect it."""
        with self._lock:
            worker = self.workers.pop(incarnation)
            server = self._servers.pop(incarnation)
            self._break_up(worker)
        server.shutdown()
        server.server_close()

    def hang(self, incarnation: str) -> None:
        with self._lock:
            worker = self.workers[incarnation]
            worker.hung = True
            self._break_up(worker)

    def named(self, plan: GroupPlan) -> list[FakeWorker | None]:
        """The plan's members in rank order; None for one that is gone."""
        return [self.workers.get(member.incarnation) for member in plan.members]

    def take(self, worker: FakeWorker, plan: GroupPlan) -> bool:
        """What a worker does with a plan; False = refused."""
        with self._lock:
            worker.plans_heard += 1
            if worker.plan is not None and plan.fence < worker.plan.fence:
                return False
            worker.plan = plan
            self._advance(plan)
            return True

    def traffic(self, load_LE: list[list[int]], group: int = 0) -> None:
        """Requests that chose experts like this: counted where they came in and where they went."""
        with self._lock:
            serving = [
                w for w in self.workers.values()
                if w.plan is not None and w.plan.group == group and w.generation > 0
            ]  # fmt: skip
            load = np.asarray(load_LE, dtype=float)
            for worker in serving:
                worker.routed_LE = worker.routed_LE + load / len(serving)
                worker.served_LS = worker.served_LS + _served(worker, load)

    def abandon(self) -> None:
        """All members give up the wave under way."""
        with self._lock:
            for worker in self.workers.values():
                if worker.plan is not None and worker.applied_epoch < worker.plan.epoch:
                    worker.abandoned_epoch = worker.plan.epoch

    def switch(self) -> None:
        """Let waves through again, the one under way first."""
        with self._lock:
            self.switching = True
            for worker in list(self.workers.values()):
                if worker.plan is not None:
                    self._advance(worker.plan)

    def _advance(self, plan: GroupPlan) -> None:
        """Bring the plan into force when all of its members have it."""
        members = self.named(plan)
        if any(m is None or m.hung or m.plan is None or m.plan.fence < plan.fence for m in members):
            return
        same_group = all(m.generation == plan.generation for m in members if m is not None)
        if same_group and not self.switching:
            return
        named = {member.incarnation for member in plan.members}
        for worker in list(self.workers.values()):
            left = worker.plan is not None and worker.plan.group == plan.group
            if left and worker.incarnation not in named:
                worker.generation, worker.phase = 0, WorkerPhase.WAITING
        for rank, member in enumerate(plan.members):
            _enter(self.workers[member.incarnation], plan, rank)

    def _break_up(self, gone: FakeWorker) -> None:
        if gone.generation == 0:
            return
        for worker in self.workers.values():
            if worker is not gone and worker.generation == gone.generation and _mates(worker, gone):
                worker.phase = WorkerPhase.DISRUPTED
                worker.suspects = sorted({*worker.suspects, gone.member})


def _served(worker: FakeWorker, load_LE: np.ndarray) -> np.ndarray:
    """Tokens of this worker's slots under the placement that it runs."""
    out = np.zeros(worker.served_LS.shape)
    for layer, slot in np.ndindex(*out.shape):
        expert = worker.slots_LRS[layer, worker.rank, slot]
        if expert >= 0:
            share = worker.fractions_LRS[layer, worker.rank, slot]
            out[layer, slot] = load_LE[layer, expert] * share
    return out


def _mates(one: FakeWorker, other: FakeWorker) -> bool:
    return bool(one.plan and other.plan and one.plan.group == other.plan.group)


def _enter(worker: FakeWorker, plan: GroupPlan, rank: int) -> None:
    slots_LRS = plan.slots()
    if worker.generation == plan.generation and worker.applied_epoch < plan.epoch:
        new_LS, old_LS = slots_LRS[:, rank], worker.slots_LRS[:, rank]
        moved = int(((new_LS >= 0) & (new_LS != old_LS)).sum())
        worker.migration = MigrationState(
            epoch=plan.epoch, bytes=moved * 1000, moves_done=moved, moves_total=moved,
            stall_millis=2.0,
        )  # fmt: skip
    worker.generation, worker.applied_epoch = plan.generation, plan.epoch
    worker.slots_LRS, worker.rank, worker.suspects = slots_LRS, rank, []
    worker.fractions_LRS = plan.fractions()
    worker.phase = WorkerPhase.DRAINING if worker.draining else WorkerPhase.SERVING
    if worker.routed_LE.size == 0:
        worker.routed_LE = np.zeros((slots_LRS.shape[0], int(slots_LRS.max()) + 1))
    worker.served_LS = np.zeros((slots_LRS.shape[0], slots_LRS.shape[2]))


def _handler(fleet: Fleet, worker: FakeWorker) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self._admitted():
                return
            if self.path == names.CONTROL_STATE:
                self._answer(200, worker.state().to_json())
            elif self.path == names.CONTROL_LOAD:
                self._answer(200, worker.load().to_json())
            else:
                self._answer(404, "{}")

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self._admitted():
                taken = fleet.take(worker, GroupPlan.from_json(body))
                self._answer(200 if taken else 409, "{}")

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self._admitted():
                worker.draining, worker.phase = True, WorkerPhase.DRAINING
                self._answer(202, "{}")

        def _admitted(self) -> bool:
            if worker.hung:
                self.close_connection = True
                return False
            if self.headers["Authorization"] != f"Bearer {worker.token}":
                self._answer(401, "{}")
                return False
            return True

        def _answer(self, status: int, body: str) -> None:
            content = body.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    return Handler
