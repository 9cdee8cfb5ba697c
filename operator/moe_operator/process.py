"""The operator process without its watcher: leadership, queue, resync, probes, and how it all ends.

`main` feeds it events and runs it. A standby collects keys and serves probes; when the lease is
won the passes begin; when it is lost, or any thread dies of a bug, the process ends non-zero and
its successor starts from what the cluster says.
"""

from __future__ import annotations

import logging
import random
import secrets
import string
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TypeVar

from moe_api import names
from moe_operator.cluster import ApiServer, Cluster, Manifest
from moe_operator.context import Clock, Context, Key
from moe_operator.errors import OperatorError, SetupError, TemporaryError
from moe_operator.events import EventRecorder
from moe_operator.intake import Intake
from moe_operator.lease import Lease
from moe_operator.metrics import OperatorMetrics
from moe_operator.probes import Probes
from moe_operator.settings import Settings
from moe_operator.watches import Watches, expected_watches
from moe_operator.workers import WorkerClient
from moe_operator.workqueue import Result, WorkQueue

WATCHED_KINDS = (
    names.DEPLOYMENT_KIND, names.PLACEMENT_KIND,
    "Pod", "Service", "ConfigMap", "PodDisruptionBudget", "Node",
)  # fmt: skip
T = TypeVar("T")
Reconcile = Callable[[Context, Key], Result]
logger = logging.getLogger(__name__)


def system_clock() -> Clock:
    """Durations go on while the machine sleeps: a lease held before a suspend has expired."""
    return Clock(
        monotonic=lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        wall=lambda: datetime.now(UTC),
    )


class Process:
    """One per process. `start`, then `wait`; `end` from anywhere; `stop` at last."""

    def __init__(
        self,
        settings: Settings,
        api: ApiServer,
        identity: str,
        clock: Clock,
        reconcile: Reconcile,
    ) -> None:
        self.settings, self._api, self._clock, self._reconcile = settings, api, clock, reconcile
        self.metrics = OperatorMetrics()
        self.watches = Watches(
            expected_watches(WATCHED_KINDS, settings.namespaces), clock.monotonic
        )
        self.lease = Lease(api, settings.lease, identity, clock, self._elected, self._lease_lost)
        self._cluster = Cluster(api, self.lease.may_write, settings.namespaces)
        self._events = EventRecorder(self._cluster, clock, identity)
        self._workers = WorkerClient(settings.worker_calls, clock.monotonic)
        self._queue: WorkQueue[Key] = WorkQueue(
            self._pass, num_threads=settings.reconcile_threads, monotonic=clock.monotonic,
            backoff=settings.backoff, observe=self._observe, log_fields=_log_fields,
        )  # fmt: skip
        self.intake = Intake(self._queue, random.random)
        self._probes = Probes(
            settings.probe_port, liveness=self.problems, readiness=self.unready,
            metrics=self.metrics.render,
        )  # fmt: skip
        self._context: Context | None = None
        self._transitions: int | None = None
        self._is_elected = threading.Event()
        self._ended = threading.Event()
        self._exit_code = 0
        self._leading = threading.Thread(target=self._lead, name="leading", daemon=True)
        self.metrics.watch_ages(self.watches.ages)
        self.metrics.queue_depth.set_function(lambda: float(self._queue.depth))
        self.metrics.leader.set_function(lambda: float(self.lease.may_write()))

    @property
    def probe_port(self) -> int:
        return self._probes.port

    def check_setup(self) -> None:
        """Wait a little for the API server and our kinds.

        Raises:
            SetupError: they are not there; the message says how to get them.
        """
        path = f"/apis/{names.API_GROUP_VERSION}"
        served = self._patiently(lambda: self._api.get(path), _kinds_missing)
        missing = _kinds_missing(served)
        if missing:
            raise SetupError(
                f"the API server does not serve {', '.join(missing)} ({names.API_GROUP_VERSION}): "
                "install the chart's CRDs (helm upgrade --install with crds.install=true, or "
                "kubectl apply -f crds/) and start the operator again"
            )
        self._patiently(self._cluster.list_deployments)  # a CRD just made answers 429 at first
        self._patiently(self._cluster.stored_leader_epoch)

    def start(self) -> None:
        threading.excepthook = self._thread_died
        self._probes.start()
        self._events.start()
        self._leading.start()
        self.lease.start()

    def end(self, exit_code: int, why: str) -> None:
        """Ask the process to end; the first reason wins."""
        if self._ended.is_set():
            return
        self._exit_code = exit_code
        logger.log(logging.ERROR if exit_code else logging.INFO, "ending: %s", why)
        self._ended.set()

    def wait(self) -> int:
        """Block until something ends this process; its exit code."""
        self._ended.wait()
        return self._exit_code

    def stop(self) -> None:
        """Finish passes in progress within the deadline, then hand the lease over."""
        seconds = self.settings.shutdown_seconds
        if not self._queue.shutdown(seconds):
            logger.warning("some passes did not end within %s s", seconds)
        self._events.stop(deadline_seconds=2.0)
        self.lease.stop(deadline_seconds=self.settings.lease.renew_deadline_seconds)
        self._workers.close()
        self._probes.stop()

    def problems(self) -> list[str]:
        """Why this process should be restarted, for liveness."""
        limit = self.settings.watches.stale_seconds
        found = [
            f"no watch of {kind} could be opened for {age:.0f} s"
            for kind, age in self.watches.ages().items()
            if age > limit
        ]
        longest = self._queue.longest_running_seconds()
        if longest > self.settings.stuck_pass_seconds:
            found.append(f"a reconcile pass has been running for {longest:.0f} s")
        return found

    def unready(self) -> list[str]:
        """Why this process cannot lead yet, nor stand by to."""
        return [f"{kind} is not watched yet" for kind in self.watches.unopened()]

    def _elected(self, transitions: int) -> None:
        self._transitions = transitions
        self._is_elected.set()

    def _lease_lost(self, why: str) -> None:
        self.end(1, f"leadership lost: {why}")

    def _lead(self) -> None:
        self._is_elected.wait()
        try:
            self._begin_passes()
            self._resync_until_ended()
        except OperatorError as error:
            self.end(1, str(error))

    def _begin_passes(self) -> None:
        assert self._transitions is not None
        epoch = 1 + max(self._patiently(self._cluster.stored_leader_epoch), self._transitions)
        self._context = Context(
            cluster=self._cluster, workers=self._workers, events=self._events,
            metrics=self.metrics, settings=self.settings, clock=self._clock,
            random_suffix=_random_suffix, leader_epoch=epoch,
        )  # fmt: skip
        logger.info("reconciling with leader epoch %d", epoch)
        where = self.settings.lease
        if (lease := self._cluster.get("Lease", where.namespace, where.name)) is not None:
            note = f"{self.lease.identity} leads, with epoch {epoch}"
            self._events.record(lease, "Normal", "LeaderChanged", note, action="Lead")
        self._queue.start()

    def _resync_until_ended(self) -> None:
        """Ask for every object: all at once at first, then again and again, spread out."""
        spread = 0.0
        while True:
            listed = self._patiently(self._cluster.list_deployments)
            self.intake.resync(listed, spread)
            spread = self.settings.resync_seconds * 0.2
            if self._ended.wait(self.settings.resync_seconds * random.uniform(0.8, 1.0)):
                return

    def _pass(self, key: Key, attempt: int) -> Result:
        assert self._context is not None, "the queue runs only when leading"
        logger.debug("pass over %s, attempt %d", key, attempt, extra=_log_fields(key))
        return self._reconcile(self._context, key)

    def _observe(self, key: Key, seconds: float, error: Exception | None) -> None:
        self.metrics.reconcile_seconds.observe(seconds)
        if error is not None:
            self.metrics.reconcile_errors.labels(reason=type(error).__name__).inc()

    def _patiently(
        self, ask: Callable[[], T], unfinished: Callable[[T], object] = lambda _: False
    ) -> T:
        """`ask` until it answers and is finished, or `setup_wait_seconds` are over."""
        deadline = self._clock.monotonic() + self.settings.setup_wait_seconds
        while True:
            late = self._clock.monotonic() >= deadline
            try:
                answer = ask()
                if late or not unfinished(answer):
                    return answer
            except TemporaryError as error:
                if late:
                    raise SetupError(f"the API server does not answer: {error}") from error
            if self._ended.wait(1.0):
                raise SetupError("ended before the API server answered")

    def _thread_died(self, died: threading.ExceptHookArgs) -> None:
        if died.exc_value is not None:
            logger.error("thread %s died", died.thread, exc_info=died.exc_value)
        self.end(1, f"thread {died.thread.name if died.thread else '?'} died of a bug")


def _kinds_missing(served: Manifest | None) -> list[str]:
    """Our kinds that discovery does not list."""
    there = {resource["name"] for resource in (served or {}).get("resources", ())}
    return [p for p in (names.DEPLOYMENT_PLURAL, names.PLACEMENT_PLURAL) if p not in there]


def _log_fields(key: Key) -> dict[str, object]:
    return {"namespace": key.namespace, "deployment": key.name}


def _random_suffix() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(5))
