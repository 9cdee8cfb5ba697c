"""The whole operator process on a real API server: Kopf, queue, lease, probes, and their faults.

The reconcile is the smallest possible (`shell_operator`); the API server is the real one, behind a
proxy where a test needs it to misbehave.
"""

from __future__ import annotations

import json
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from devcluster.api import ApiError
from devcluster.cluster import Cluster
from devcluster.waiting import wait_until
from moe_api import names
from tests.support.api_proxy import ApiProxy, Fault, Request
from tests.support.operator_process import OperatorProcess, free_port

pytestmark = pytest.mark.apiserver
PATIENCE_SECONDS = 30.0
WATCHES = {"server_timeout_seconds": 60, "inactivity_seconds": 4, "stale_seconds": 5}
SHORT_LEASE = {"duration_seconds": 4, "renew_deadline_seconds": 3, "retry_seconds": 0.5}
"""Only where leadership is the matter: a busy machine may lose it."""
NUM_WATCHES = 7


class World:
    """A namespace with our kinds, and operators that serve only this namespace."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, stack: ExitStack) -> None:
        self.cluster, self.namespace, self.api = cluster, namespace, cluster.api
        self._folder, self._stack = folder, stack
        self._operators: list[OperatorProcess] = []
        self._path = f"/apis/{names.API_GROUP_VERSION}/namespaces/{namespace}/moedeployments"

    def operator(
        self, proxy: ApiProxy | None = None, lease: dict[str, float] | None = None, **settings: Any
    ) -> OperatorProcess:
        """Start one more operator; it is killed at the end of the test."""
        number = secrets.token_hex(3)
        kubeconfig = self.cluster.kubeconfig
        if proxy is not None:
            kubeconfig = proxy.write_kubeconfig(self._folder / f"kubeconfig-{number}")
        port = free_port()
        told = {
            "namespaces": [self.namespace],
            "lease": {"namespace": self.namespace, **(lease or {})},
            "probe_port": port,
            "watches": WATCHES,
            "backoff": {"base_seconds": 0.1, "event_floor_seconds": 0.1},
            "setup_wait_seconds": 3.0,
            **settings,
        }
        command = ("tests.support.shell_operator", json.dumps(told))
        log = self._folder / f"operator-{number}.log"
        operator = OperatorProcess(kubeconfig, log, *command, probe_port=port)
        self._operators.append(operator)
        return self._stack.enter_context(operator)

    def _check(self) -> None:
        """Waiting is in vain when no operator runs."""
        if all(operator.process.poll() is not None for operator in self._operators):
            raise AssertionError(self._operators[-1].log.read_text()[-3000:])

    def proxy(self) -> ApiProxy:
        cluster = self.cluster
        return self._stack.enter_context(ApiProxy(cluster.url, cluster.token, cluster.authority))

    def create(self, name: str, **spec: Any) -> dict[str, Any]:
        body = {
            "apiVersion": names.API_GROUP_VERSION,
            "kind": names.DEPLOYMENT_KIND,
            "metadata": {"name": name},
            "spec": {"model": {"uri": "file:///models/tiny"}, **spec},
        }
        made: dict[str, Any] = self.api.request("POST", self._path, body)
        return made

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"{self._path}/{name}")
        return found

    def change(self, name: str, patch: dict[str, Any]) -> None:
        self.api.patch(f"{self._path}/{name}", patch)

    def delete(self, name: str) -> None:
        self.api.request("DELETE", f"{self._path}/{name}")

    def create_pod(self, name: str, deployment: str) -> None:
        labels = {names.LABEL_DEPLOYMENT: deployment}
        body = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"containers": [{"name": "worker", "image": "moe.test/none:1"}]},
        }
        self.api.request("POST", f"/api/v1/namespaces/{self.namespace}/pods", body)

    def delete_pod(self, name: str) -> None:
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}?gracePeriodSeconds=0"
        self.api.request("DELETE", path)

    def echo(self, name: str) -> dict[str, str]:
        """What the last pass over the deployment saw, empty before the first."""
        try:
            path = f"/api/v1/namespaces/{self.namespace}/configmaps/{name}-echo"
            data: dict[str, str] = self.api.get(path)["data"]
        except ApiError as error:
            if error.status == 404:
                return {}
            raise
        return data

    def events(self) -> list[str]:
        """Reasons of all events in the namespace."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.namespace}/events"
        return [event["reason"] for event in self.api.get(path)["items"]]

    def wait_for_echo(self, name: str, **expected: str) -> None:
        wait_until(
            lambda: expected.items() <= self.echo(name).items() and bool(self.echo(name)),
            PATIENCE_SECONDS,
            f"a pass over {name} that saw {expected}",
            check=self._check,
            explain=lambda: str(self.echo(name)),
        )

    def wait_for_ready(self, name: str, ready: str) -> None:
        def holds() -> bool:
            return self.deployment(name).get("status", {}).get("ready") == ready

        wait_until(holds, PATIENCE_SECONDS, f"status.ready {ready} of {name}", check=self._check)


@pytest.fixture
def world(custom_resources: Cluster, namespace: str, tmp_path: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(custom_resources, namespace, tmp_path, stack)


def test_f02_a_deployment_lives_and_dies_without_a_trace_of_kopf(world: World) -> None:
    """F02: no annotation, no finalizer, no managed field but ours; children go by ownership."""
    operator = world.operator()
    world.create("d")
    world.wait_for_ready("d", "1/1")
    world.change("d", {"spec": {"replicas": 3}})
    world.wait_for_echo("d", replicas="3")
    world.wait_for_ready("d", "3/3")
    seen = world.deployment("d")["metadata"]
    assert "annotations" not in seen
    assert "finalizers" not in seen
    managers = {(m["manager"], m.get("subresource", "")) for m in seen["managedFields"]}
    assert ("moe-operator", "status") in managers
    assert not [m for m, _ in managers if "kopf" in m.lower()]
    assert operator.errors() == []
    assert operator.terminate() == 0
    world.delete("d")  # with the operator down
    wait_until(lambda: world.echo("d") == {}, PATIENCE_SECONDS, "garbage collection of the child")


def test_f03_an_idle_object_is_left_alone_by_every_resync(world: World) -> None:
    operator = world.operator(resync_seconds=0.2)
    world.create("d")
    world.wait_for_ready("d", "1/1")
    before = world.deployment("d")["metadata"]["resourceVersion"]

    def passes() -> float:
        text = operator.probe("/metrics")[1]
        counts = [ln.split()[1] for ln in text.splitlines() if "reconcile_seconds_count" in ln]
        return float(counts[0]) if counts else 0.0

    begun = passes()
    wait_until(lambda: passes() >= begun + 20, PATIENCE_SECONDS, "20 passes")
    assert world.deployment("d")["metadata"]["resourceVersion"] == before


def test_f08_a_stale_status_is_computed_again_and_the_users_edit_is_kept(world: World) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy)
    world.create("d")
    world.wait_for_ready("d", "1/1")
    refused: list[Request] = []

    def two_conflicts(request: Request) -> Fault | None:
        if request.method != "PATCH" or not request.path.endswith("/status") or len(refused) >= 2:
            return None
        refused.append(request)
        if len(refused) == 1:
            world.change("d", {"spec": {"replicas": 3}})  # the user is faster
        return Fault(409)

    proxy.rules.append(two_conflicts)
    world.change("d", {"spec": {"replicas": 2}})
    world.wait_for_ready("d", "3/3")
    assert len(refused) == 2
    assert world.deployment("d")["spec"]["replicas"] == 3
    assert operator.errors() == []
    assert [ln for ln in operator.lines() if "attempt 2" in ln["message"]]


def test_f08_an_object_deleted_under_a_status_write_ends_quietly(world: World) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy)
    world.create("d")
    world.wait_for_ready("d", "1/1")
    held, gone = threading.Event(), threading.Event()

    def hold(request: Request) -> Fault | None:
        if request.method == "PATCH" and request.path.endswith("/status"):
            held.set()
            return Fault(until=gone)
        return None

    proxy.rules.append(hold)
    world.change("d", {"spec": {"replicas": 2}})
    assert held.wait(PATIENCE_SECONDS)
    world.delete("d")
    gone.set()
    proxy.rules.clear()
    world.create("e")
    world.wait_for_ready("e", "1/1")
    assert operator.errors() == []


@pytest.mark.parametrize("fault", ["mute", "expire", "reset"])
def test_f04_what_happens_while_a_watch_is_dead_is_still_noticed(world: World, fault: str) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy)
    operator.wait_until_ready()
    world.create("a")
    world.create_pod("p1", "a")
    world.create_pod("p2", "a")
    world.wait_for_echo("a", pods="p1,p2")
    break_watches: dict[str, Callable[[], None]] = {
        "mute": proxy.mute_watches,
        "expire": lambda: proxy.fail_watches(410),
        "reset": proxy.reset_watches,
    }
    wait_until(lambda: proxy.open_watches >= NUM_WATCHES, PATIENCE_SECONDS, "all watches open")
    break_watches[fault]()
    world.create("b")
    world.delete_pod("p2")
    world.wait_for_echo("b")
    world.wait_for_echo("a", pods="p1")
    assert operator.probe("/healthz") == (200, "ok\n")
    assert operator.process.poll() is None


def test_f04_liveness_fails_when_no_watch_can_be_opened(world: World) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy)
    operator.wait_until_ready()
    assert operator.probe("/healthz")[0] == 200
    proxy.rules.append(lambda request: Fault(500) if request.watching else None)
    proxy.reset_watches()
    wait_until(lambda: operator.probe("/healthz")[0] == 503, PATIENCE_SECONDS, "failed liveness")
    assert "could be opened for" in operator.probe("/healthz")[1]
    proxy.rules.clear()
    wait_until(lambda: operator.probe("/healthz")[0] == 200, PATIENCE_SECONDS, "liveness again")


def test_f04_a_watcher_that_fails_ends_the_process(world: World) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy)
    operator.wait_until_ready()
    wait_until(lambda: proxy.open_watches >= NUM_WATCHES, PATIENCE_SECONDS, "all watches open")
    proxy.fail_watches(500)
    assert operator.process.wait(PATIENCE_SECONDS) == 1
    assert operator.said("ending: the watcher ended")


def test_a_killed_leader_is_succeeded_with_a_higher_epoch(world: World) -> None:
    first = world.operator(lease=SHORT_LEASE)
    first.wait_until_leading()
    second = world.operator(lease=SHORT_LEASE)
    second.wait_until_ready()  # a standby is ready
    world.create("d")
    world.wait_for_echo("d", leaderEpoch="1")
    assert not second.said("reconciling with leader epoch")
    first.kill()
    second.wait_until_leading()
    world.wait_for_echo("d", leaderEpoch="2")
    wait_until(lambda: world.events().count("LeaderChanged") == 2, PATIENCE_SECONDS, "two events")


def test_a_leader_that_ends_well_hands_over_at_once(world: World) -> None:
    lease = {"duration_seconds": 60, "renew_deadline_seconds": 40}
    first = world.operator(lease=lease)
    first.wait_until_leading()
    second = world.operator(lease=lease)
    second.wait_until_ready()
    assert first.terminate() == 0
    second.wait_until_leading()


def test_a_leader_that_slept_through_its_lease_writes_nothing_and_exits(world: World) -> None:
    first = world.operator(lease=SHORT_LEASE)
    first.wait_until_leading()
    world.create("d")
    world.wait_for_echo("d", leaderEpoch="1")
    second = world.operator(lease=SHORT_LEASE)
    second.wait_until_ready()
    first.process.send_signal(signal.SIGSTOP)
    second.wait_until_leading()
    world.wait_for_echo("d", leaderEpoch="2")
    version = world.deployment("d")["metadata"]["resourceVersion"]
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(PATIENCE_SECONDS) == 1
    assert first.said("leadership lost")
    assert world.echo("d")["leaderEpoch"] == "2"
    assert world.deployment("d")["metadata"]["resourceVersion"] == version


def test_a_leader_cut_off_from_the_api_server_exits(world: World) -> None:
    proxy = world.proxy()
    operator = world.operator(proxy, lease=SHORT_LEASE)
    operator.wait_until_leading()
    proxy.rules.append(lambda request: Fault(500))
    assert operator.process.wait(PATIENCE_SECONDS) == 1
    assert operator.said("leadership lost: the lease was not renewed for 3 s")


def test_without_our_kinds_the_start_says_what_to_install(world: World) -> None:
    proxy = world.proxy()
    proxy.rules.append(
        lambda request: Fault(404) if request.path.endswith(names.API_GROUP_VERSION) else None
    )
    operator = world.operator(proxy)
    assert operator.process.wait(PATIENCE_SECONDS) == 2
    told = operator.log.read_text()
    assert "does not serve moedeployments, expertplacements" in told
    assert "crds.install=true" in told
    assert "Traceback" not in told
