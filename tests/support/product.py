"""The product on the full cluster: the chart installed as users install it, and one deployment's
life.

Used by tests/cluster only. Requests go straight to pod addresses, which this machine reaches.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import numpy.typing as npt

from devcluster import chart
from devcluster.cluster import Cluster
from devcluster.waiting import wait_until
from moe_api import names
from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from tests.support.manifests import merged, moe_deployment

OPERATOR_NAMESPACE = "moe-system"
READY_SECONDS = 600.0
"""A first start may compile kernels."""
SMALL = {
    "model": {"uri": f"file://{chart.MODEL_MOUNT}", "servedName": "tiny-moe"},
    "kvCache": {"blocks": 256},
    "scheduler": {"maxRunning": 8, "maxBatchedTokens": 128},
    "worker": {"resources": {"requests": {"cpu": "50m", "memory": "256Mi"}}},
    "disruption": {"drainSeconds": 20},
    "rebalancing": {
        "mode": "Off", "intervalSeconds": 1, "windowSeconds": 10, "cooldownSeconds": 0,
        "deadlineSeconds": 60, "budget": {"maxStallMillis": 10_000},
    },
}  # fmt: skip


def install(cluster: Cluster, folder: Path) -> None:
    """Helm-install the chart and wait until the operator is ready."""
    values = chart.write(folder / "values.json")
    cluster.helm(
        "upgrade", "--install", "moe-operator", str(chart.CHART), "--values", str(values),
        "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s",
    )  # fmt: skip


def uninstall(cluster: Cluster) -> None:
    cluster.kubectl("delete", "moed", "--all", "--all-namespaces", "--ignore-not-found")
    cluster.helm("uninstall", "moe-operator", "--namespace", OPERATOR_NAMESPACE)


@dataclass(frozen=True)
class Counters:
    served_LR: npt.NDArray[np.float64]
    """Tokens that each rank's slots received."""
    routed_LE: npt.NDArray[np.float64]
    """Tokens that chose each expert."""


@dataclass
class Deployment:
    """A MoEDeployment in the cluster; every look is a fresh one."""

    cluster: Cluster
    namespace: str
    name: str
    spec: dict[str, Any] = field(default_factory=dict)

    def apply(self, **blocks: Any) -> None:
        """Apply the spec with these blocks merged over it, and remember them."""
        self.spec = merged(self.spec or SMALL, blocks)
        manifest = moe_deployment(self.name, self.spec, self.namespace)
        self.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def patch(self, spec: Mapping[str, Any]) -> None:
        self.kubectl("patch", "moed", self.name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def kubectl(self, *arguments: str) -> str:
        return self.cluster.kubectl("-n", self.namespace, *arguments)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] = json.loads(text) if text.strip() else {}
        return found

    @property
    def object(self) -> dict[str, Any]:
        return self.get("moed", self.name)

    @property
    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.object.get("status", {})
        return status

    def condition(self, kind: str) -> tuple[str, str]:
        """(status, reason); empty strings while there is none."""
        for condition in self.status.get("conditions", []):
            if condition["type"] == kind:
                return condition["status"], condition["reason"]
        return "", ""

    def placement(self, group: int = 0) -> dict[str, Any]:
        return self.get("xp", names.group_name(self.name, group))

    def pods(self, group: int | None = None) -> list[dict[str, Any]]:
        selector = f"{names.LABEL_DEPLOYMENT}={self.name}"
        if group is not None:
            selector += f",{names.LABEL_GROUP}={group}"
        found: list[dict[str, Any]] = json.loads(
            self.kubectl("get", "pods", "-l", selector, "-o", "json")
        )["items"]
        return found

    def uids(self, group: int | None = None) -> set[str]:
        return {pod["metadata"]["uid"] for pod in self.pods(group)}

    def wait(self, done: Callable[[], bool], what: str, seconds: float = READY_SECONDS) -> None:
        wait_until(
            done, seconds, what, explain=lambda: json.dumps(self.status), interval_seconds=0.3
        )

    def wait_ready(self) -> None:
        self.wait(
            lambda: (
                self.condition("Ready")[0] == "True"
                and self.status["observedGeneration"] == self.object["metadata"]["generation"]
            ),
            f"{self.name} to be Ready",
        )

    def addresses(self) -> list[str]:
        """Base URLs of the members of group 0, in the order of ranks."""
        members = self.placement()["spec"]["members"]
        return [f"http://{member['address']}:{names.HTTP_PORT}" for member in members]

    def plan(self) -> GroupPlan:
        """Of group 0, as stored."""
        return GroupPlan.model_validate(self.placement()["spec"])

    def counters(self) -> Counters:
        """What the members of group 0 have counted by now."""
        uid = self.object["metadata"]["uid"]
        secret = self.get("secret", names.control_secret_name(self.name, uid))
        token = base64.b64decode(secret["data"][names.CONTROL_TOKEN_FILE]).decode()
        reports = []
        for member in self.plan().members:
            url = f"http://{member.address}:{names.CONTROL_PORT}{names.CONTROL_LOAD}"
            reply = httpx.get(
                url, headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
            )
            assert reply.status_code == 200, reply.text
            reports.append(LoadReport.from_json(reply.content))
        served = [np.asarray(report.served, dtype=float).sum(axis=1) for report in reports]
        routed = np.sum([np.asarray(report.routed, dtype=float) for report in reports], axis=0)
        return Counters(np.stack(served, axis=1), routed)

    def replay(self, prompts: Sequence[str], max_tokens: int = 8) -> None:
        """Each prompt once, greedily, rank after rank in turn, all ranks at the same time; none of
        it is taken from the prefix cache, so that each replay routes the same tokens."""
        addresses = self.addresses()

        def drive(rank: int) -> None:
            for prompt in prompts[rank :: len(addresses)]:
                self.answer(prompt, max_tokens, addresses[rank], cache_salt=uuid4().hex)

        with ThreadPoolExecutor(len(addresses)) as pool:
            list(pool.map(drive, range(len(addresses))))

    def answer(
        self, prompt: str, max_tokens: int = 16, address: str | None = None, **fields: Any
    ) -> str:
        """A greedy completion of one rank (rank 0 if not told)."""
        url = f"{address or self.addresses()[0]}/v1/completions"
        body = {"model": "tiny-moe", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        reply = httpx.post(url, json=body | fields, timeout=60, trust_env=False)
        assert reply.status_code == 200, reply.text
        text: str = reply.json()["choices"][0]["text"]
        return text


class Traffic:
    """Completions against some addresses until the context ends; keeps what went wrong."""

    def __init__(self, addresses: list[str], prompt: str) -> None:
        self.served = 0
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._drive, args=(address, prompt)) for address in addresses
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)

    def _drive(self, address: str, prompt: str) -> None:
        body = {"model": "tiny-moe", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._stop.is_set():
                try:
                    reply = client.post(f"{address}/v1/completions", json=body)
                except httpx.HTTPError as error:
                    outcome = f"{type(error).__name__}: {error}"
                else:
                    if "retry-after" in reply.headers:  # "not now" is an answer
                        self._stop.wait(0.5)
                        continue
                    outcome = "" if reply.status_code == 200 else reply.text
                with self._lock:
                    if outcome:
                        self.failed.append(f"{address}: {outcome}")
                        return
                    self.served += 1


@contextmanager
def traffic(addresses: list[str], prompt: str) -> Iterator[Traffic]:
    running = Traffic(addresses, prompt)
    try:
        yield running
    finally:
        running.close()
