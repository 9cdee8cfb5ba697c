"""Real worker processes under the real reconcile: pods of the API server become `moe-worker serve`.

The kubelet played here starts a process for each pod, sends SIGTERM when the pod is deleted, and
tells readiness from /readyz. Time is real: a pass comes when the one before asked for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster as ApiServerInstance
from moe_api import names
from moe_operator.context import Clock
from moe_operator.workqueue import Result
from tests.support.reconcile_world import Manifest, World

SOURCE_ROOTS = ("core", "worker", "kernels")


class RealWorker:
    """One process of `moe-worker serve`; what the played kubelet needs of it."""

    def __init__(
        self,
        address: str,
        member: int,
        incarnation: str,
        command: list[str],
        identity: dict[str, str],
        log: Path,
    ) -> None:
        self.address, self.member, self.incarnation, self.log = address, member, incarnation, log
        path = os.pathsep.join(str(CHECKOUT / root) for root in SOURCE_ROOTS)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **identity, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self.http = httpx.Client(base_url=f"http://{address}:{names.HTTP_PORT}", timeout=60)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def serves(self) -> bool:
        try:
            return self.http.get("/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def terminate(self) -> None:
        if not self.ended:
            self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if not self.ended:
            self.process.kill()
        self.process.wait(30)
        self.http.close()


class RealFleet:
    """Worker processes by incarnation; a context manager that leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token = folder, ""
        self.workers: dict[str, RealWorker] = {}

    def __enter__(self) -> RealFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        for incarnation in list(self.workers):
            self.kill(incarnation)

    def kill(self, incarnation: str) -> None:
        self.workers.pop(incarnation).kill()


class RealWorld(World):
    def __init__(self, server: ApiServerInstance, namespace: str, fleet: RealFleet) -> None:
        super().__init__(server, namespace, fleet)  # type: ignore[arg-type]
        self.real: RealFleet = fleet
        clock = Clock(time.monotonic, self.context.clock.wall)
        self.context = replace(self.context, clock=clock)
        self._terminated: set[str] = set()

    def one_pass(self, name: str = "d") -> Result:
        result = super().one_pass(name)
        # As the queue does; events would only make it sooner.
        time.sleep(min(result.requeue_after_seconds or 0.5, 0.5))
        return result

    def converge(
        self, done: Callable[[], object], name: str = "d", deadline_seconds: float = 60.0
    ) -> None:
        deadline = time.monotonic() + deadline_seconds
        while True:
            self.one_pass(name)
            if done():
                return
            assert time.monotonic() < deadline, f"status: {self.get(name).get('status')}"

    def _run(self, pod: Manifest, address: str, member: int) -> Any:
        config = self.child("configmaps", names.config_name("d"))
        assert config is not None, "config comes before the pods that mount it"
        uid, folder = pod["metadata"]["uid"], self.real.folder
        (folder / f"{uid}.json").write_text(config["data"][names.CONFIG_FILE])
        (folder / "token").write_text(self.real.token)
        command = [
            sys.executable, "-m", "moe_worker.main", "serve", "--host", address,
            "--config", str(folder / f"{uid}.json"), "--control-token-file", str(folder / "token"),
        ]  # fmt: skip
        identity = {
            names.ENV_NAMESPACE: self.namespace,
            names.ENV_DEPLOYMENT: "d",
            names.ENV_GROUP: pod["metadata"]["labels"][names.LABEL_GROUP],
            names.ENV_MEMBER: str(member),
            names.ENV_POD_NAME: pod["metadata"]["name"],
            names.ENV_POD_UID: uid,
            names.ENV_POD_IP: address,
        }
        worker = RealWorker(address, member, uid, command, identity, folder / f"{uid}.log")
        self.real.workers[uid] = worker
        return worker

    def _serves(self, worker: Any) -> bool:
        assert not worker.ended or worker.incarnation in self._terminated, worker.log.read_text()
        return bool(worker.serves())

    def _terminate(self, pod: Manifest, worker: Any) -> None:
        if worker.incarnation not in self._terminated:
            self._terminated.add(worker.incarnation)
            worker.terminate()
        if worker.ended:
            path = f"{self._path('pods')}/{pod['metadata']['name']}"
            self.api.request("DELETE", f"{path}?gracePeriodSeconds=0")
            self.real.kill(worker.incarnation)
