"""A namespace of a real API server with a kubelet played by the test: pods become fake workers.

`World.converge` runs passes of the real `reconcile` until something holds, moving the clock as far
as each pass asks. `forgetful` gives every pass an empty memory, as after a restart of the operator.
"""

from __future__ import annotations

import base64
import datetime
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from devcluster.api import ApiError
from devcluster.cluster import Cluster as ApiServerInstance
from moe_api import names
from moe_api.status import MoEDeploymentStatus
from moe_api.worker import WorkerPhase
from moe_operator.api_server import ApiServer
from moe_operator.cluster import Cluster, connect, load_credentials
from moe_operator.context import Clock, Context, Key, Memory
from moe_operator.errors import TemporaryError
from moe_operator.events import EventRecorder
from moe_operator.metrics import OperatorMetrics
from moe_operator.reconcile import reconcile
from moe_operator.settings import ClientSettings, Settings, WorkerCallSettings, WorkerDefaults
from moe_operator.workers import WorkerClient
from moe_operator.workqueue import Result
from tests.support.fake_workers import FakeWorker, Fleet
from tests.support.worker_processes import free_network

Manifest = dict[str, Any]
MAX_PASSES = 60
RETRY_SECONDS = 20.0


class World:
    def __init__(self, server: ApiServerInstance, namespace: str, fleet: Fleet) -> None:
        self.api, self.namespace, self.fleet = server.api, namespace, fleet
        self.now = 1000.0
        self.events: list[tuple[str, str]] = []
        self.shape_workers: Callable[[FakeWorker], None] = lambda worker: None
        """Called for each worker as it starts."""
        self.nodes: dict[int, str] = {}
        """Node that pods of a member are bound to; unbound pods die at once when deleted."""
        self.forgetful = False
        self._network = free_network()
        self._hosts = itertools.count(2)
        self._suffixes = itertools.count()
        send = connect(load_credentials(str(server.kubeconfig)))
        cluster = Cluster(ApiServer(send, ClientSettings(500, 500), time.monotonic), lambda: True)
        clock = Clock(lambda: self.now, lambda: datetime.datetime.now(datetime.UTC))
        calls = WorkerCallSettings(connect_timeout_seconds=0.5, deadline_seconds=1.0)
        self.context = Context(
            cluster=cluster,
            workers=WorkerClient(calls, time.monotonic),
            events=_Events(cluster, clock, self.events),
            metrics=OperatorMetrics(),
            settings=Settings(worker=WorkerDefaults(image="worker:test")),
            clock=clock,
            random_suffix=lambda: f"s{next(self._suffixes):04d}",
            leader_epoch=1,
        )

    def close(self) -> None:
        self.context.workers.close()

    # The user.

    def create(self, name: str = "d", **spec: Any) -> None:
        manifest = {
            "apiVersion": names.API_GROUP_VERSION,
            "kind": names.DEPLOYMENT_KIND,
            "metadata": {"name": name},
            "spec": {"model": {"uri": "file:///models/tiny"}, **spec},
        }
        self.api.request("POST", self._path(names.DEPLOYMENT_PLURAL), manifest)

    def edit(self, spec: Manifest, name: str = "d") -> None:
        self.api.patch(f"{self._path(names.DEPLOYMENT_PLURAL)}/{name}", {"spec": spec})

    def delete(self, plural: str, name: str) -> None:
        self.api.request("DELETE", f"{self._path(plural)}/{name}")

    def delete_pod(self, member: int, group: int = 0, grace_seconds: int = 0) -> None:
        [pod] = [p for p in self.pods(group) if p["metadata"]["labels"][names.LABEL_MEMBER]
                 == str(member)]  # fmt: skip
        path = f"{self._path('pods')}/{pod['metadata']['name']}"
        self.api.request("DELETE", f"{path}?gracePeriodSeconds={grace_seconds}")

    # The operator.

    def one_pass(self, name: str = "d") -> Result:
        """One pass as the queue would run it: what is temporary is tried again."""
        self.kubelet()
        context = replace(self.context, memory=Memory()) if self.forgetful else self.context
        key, deadline = Key(self.namespace, name), time.monotonic() + RETRY_SECONDS
        while True:
            try:
                result = reconcile(context, key)
            except TemporaryError:
                assert time.monotonic() < deadline, "the API server is not available"
                time.sleep(0.05)
                continue
            # At least the time between two writes, so that every pass may tell what it saw.
            self.now += max(result.requeue_after_seconds or 0.0, 1.0)
            return result

    def converge(self, done: Callable[[], object], name: str = "d") -> None:
        """Passes until `done()`; fails after MAX_PASSES with the last status."""
        for _ in range(MAX_PASSES):
            self.one_pass(name)
            if done():
                return
        raise AssertionError(
            f"not within {MAX_PASSES} passes; status: {self.get(name).get('status')}"
        )

    def restart_operator(self) -> None:
        """A new leader: nothing remembered, a higher epoch."""
        self.context = replace(
            self.context, memory=Memory(), leader_epoch=self.context.leader_epoch + 1
        )

    # What is there.

    def get(self, name: str = "d") -> Manifest:
        found: Manifest = self.api.get(f"{self._path(names.DEPLOYMENT_PLURAL)}/{name}")
        return found

    def status(self, name: str = "d") -> MoEDeploymentStatus:
        return MoEDeploymentStatus.model_validate(self.get(name).get("status") or {})

    def condition(self, kind: str, name: str = "d") -> tuple[str, str]:
        """(status, reason), ("", "") before it is told."""
        for condition in self.status(name).conditions:
            if condition.type == kind:
                return condition.status, condition.reason
        return "", ""

    def is_ready(self, name: str = "d") -> bool:
        status = self.status(name)
        fresh = status.observed_generation == self.get(name)["metadata"]["generation"]
        return fresh and self.condition("Ready", name)[0] == "True"

    def pods(self, group: int | None = None) -> list[Manifest]:
        items: list[Manifest] = self.api.get(self._path("pods"))["items"]
        if group is None:
            return items
        return [p for p in items if p["metadata"]["labels"][names.LABEL_GROUP] == str(group)]

    def uids(self, group: int | None = None) -> list[str]:
        return sorted(pod["metadata"]["uid"] for pod in self.pods(group))

    def placement(self, group: int = 0, name: str = "d") -> Manifest | None:
        path = f"{self._path(names.PLACEMENT_PLURAL)}/{names.group_name(name, group)}"
        return self.find(path)

    def child(self, plural: str, name: str) -> Manifest | None:
        return self.find(f"{self._path(plural)}/{name}")

    def secret(self, name: str = "d") -> Manifest | None:
        """The control secret that the operator made."""
        query = f"labelSelector={names.LABEL_DEPLOYMENT}%3D{name}"
        found: list[Manifest] = self.api.get(f"{self._path('secrets')}?{query}")["items"]
        assert len(found) <= 1, "it is made once"
        return found[0] if found else None

    def budget(self, group: int = 0, name: str = "d") -> int:
        path = f"/apis/policy/v1/namespaces/{self.namespace}/poddisruptionbudgets"
        found = self.find(f"{path}/{names.group_name(name, group)}")
        assert found is not None
        return int(found["spec"]["minAvailable"])

    def find(self, path: str) -> Manifest | None:
        try:
            found: Manifest = self.api.get(path)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        return found

    def worker(self, member: int, group: int = 0) -> FakeWorker:
        [pod] = [p for p in self.pods(group)
                 if p["metadata"]["labels"][names.LABEL_MEMBER] == str(member)
                 and "deletionTimestamp" not in p["metadata"]]  # fmt: skip
        return self.fleet.workers[pod["metadata"]["uid"]]

    # The kubelet.

    def kubelet(self) -> None:
        """Start workers for new pods, stop those whose pod is gone, tell the pods' states."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.pods()}
        for uid in set(self.fleet.workers) - set(pods):
            self.fleet.kill(uid)
        for uid, pod in pods.items():
            labels, status = pod["metadata"]["labels"], pod.get("status") or {}
            if status.get("phase") in ("Failed", "Succeeded"):
                if uid in self.fleet.workers:
                    self.fleet.kill(uid)
                continue
            if uid not in self.fleet.workers:
                self._start(pod, int(labels[names.LABEL_MEMBER]))
            worker = self.fleet.workers[uid]
            if "deletionTimestamp" in pod["metadata"]:
                self._terminate(pod, worker)
            if uid in self.fleet.workers:
                self._tell(pod, worker)

    def make_node(self, suffix: str = "", **labels: str) -> str:
        """A node that pods can be bound to; nothing runs on it."""
        name = f"node-{self.namespace}{suffix}"
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": "",
                 "lastHeartbeatTime": "2026-01-01T00:00:00Z",
                 "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
        metadata = {"name": name, "labels": labels}
        self.api.request("POST", "/api/v1/nodes", {"metadata": metadata})
        self.api.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})
        return name

    def fail_pod(self, member: int, group: int = 0) -> None:
        """Its container ends with exit code 137; the pod stays, as pods do that never restart."""
        [pod] = [p for p in self.pods(group)
                 if p["metadata"]["labels"][names.LABEL_MEMBER] == str(member)
                 and (p.get("status") or {}).get("phase") == "Running"]  # fmt: skip
        ended = {"exitCode": 137, "reason": "Error", "startedAt": "2026-01-01T00:00:00Z",
                 "finishedAt": "2026-01-01T00:00:05Z"}  # fmt: skip
        self._patch_status(
            pod,
            {
                "phase": "Failed",
                "containerStatuses": [_container({"terminated": ended}, ready=False)],
                "conditions": [{"type": "Ready", "status": "False"}],
            },
        )

    def _start(self, pod: Manifest, member: int) -> None:
        if not self.fleet.token:
            secret = self.secret()
            assert secret is not None, "pods are made after the control secret"
            self.fleet.token = base64.b64decode(secret["data"]["token"]).decode()
        address = f"{self._network}.{next(self._hosts)}"
        if member in self.nodes:
            self._bind(pod, self.nodes[member])
        self.shape_workers(self._run(pod, address, member))

    def _run(self, pod: Manifest, address: str, member: int) -> FakeWorker:
        return self.fleet.start(address, member, pod["metadata"]["uid"])

    def _bind(self, pod: Manifest, node: str) -> None:
        name = pod["metadata"]["name"]
        target = {"apiVersion": "v1", "kind": "Node", "name": node}
        body = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        self.api.request("POST", f"{self._path('pods')}/{name}/binding", body)

    def _terminate(self, pod: Manifest, worker: FakeWorker) -> None:
        """SIGTERM drains; the process ends when a plan without it came, or nothing holds it."""
        worker.draining = True
        if worker.phase is WorkerPhase.SERVING:
            worker.phase = WorkerPhase.DRAINING
        if worker.generation == 0:
            path = f"{self._path('pods')}/{pod['metadata']['name']}"
            self.api.request("DELETE", f"{path}?gracePeriodSeconds=0")
            self.fleet.kill(worker.incarnation)

    def _serves(self, worker: FakeWorker) -> bool:
        return worker.phase is WorkerPhase.SERVING and not worker.hung

    def _tell(self, pod: Manifest, worker: FakeWorker) -> None:
        ready = self._serves(worker)
        wanted = {
            "phase": "Running",
            "podIP": worker.address,
            "podIPs": [{"ip": worker.address}],
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
            "containerStatuses": [_container({"running": {}}, ready=ready)],
        }
        status = pod.get("status") or {}
        known = status.get("podIP"), _is_ready(status)
        if known != (worker.address, ready):
            self._patch_status(pod, wanted)

    def _patch_status(self, pod: Manifest, status: Manifest) -> None:
        path = f"{self._path('pods')}/{pod['metadata']['name']}/status"
        self.api.patch(path, {"status": status})

    def _path(self, plural: str) -> str:
        if plural in (names.DEPLOYMENT_PLURAL, names.PLACEMENT_PLURAL):
            return f"/apis/{names.API_GROUP_VERSION}/namespaces/{self.namespace}/{plural}"
        return f"/api/v1/namespaces/{self.namespace}/{plural}"


class _Events(EventRecorder):
    """The real recorder, whose thread is never started, and which also keeps what it was told."""

    def __init__(self, cluster: Cluster, clock: Clock, told: list[tuple[str, str]]) -> None:
        super().__init__(cluster, clock, "test")
        self._told = told

    def record(
        self, about: Any, severity: Any, reason: str, note: str, action: str = "Reconcile"
    ) -> None:
        self._told.append((reason, note))
        super().record(about, severity, reason, note, action)


def _container(state: Manifest, *, ready: bool) -> Manifest:
    return {
        "name": names.WORKER_CONTAINER, "image": "worker:test", "imageID": "", "ready": ready,
        "restartCount": 0, "state": state,
    }  # fmt: skip


def _is_ready(status: Manifest) -> bool:
    return any(
        c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ()
    )
