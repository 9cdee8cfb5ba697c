"""The test cluster itself: pods on all nodes reach each other, people reach pods, faults bite.

These run before anything else may trust the cluster; the last one takes a cluster down and looks
for what it left.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from devcluster import faults, lifecycle, network, processes
from devcluster.api import is_ready
from devcluster.build import CHECKOUT
from devcluster.cgroups import Cgroups
from devcluster.cluster import Cluster
from devcluster.errors import CommandFailed
from devcluster.instance import Instance
from devcluster.overlay import host_overlay
from devcluster.spec import GPU, RACK, ZONE, control_plane_only, with_nodes
from devcluster.waiting import wait_until
from tests.support.cluster_fixtures import fresh_namespace

pytestmark = pytest.mark.cluster

LABELS = {"app": "echo"}
USER = 65532
# Answers each connection with the name of its node.
SERVER = (
    "import http.server, os\n"
    "class Name(http.server.BaseHTTPRequestHandler):\n"
    "    def do_GET(self):\n"
    "        self.send_response(200); self.end_headers()\n"
    "        self.wfile.write(os.environ['NODE'].encode())\n"
    "print('serving on', os.environ['NODE'], flush=True)\n"
    "http.server.ThreadingHTTPServer(('', 8000), Name).serve_forever()\n"
)


def _deployment(replicas: int) -> dict[str, Any]:
    """Pods of an unprivileged user that run this checkout's Python, at most one on a node."""
    spec = host_overlay("echo")["spec"]
    [container] = spec["containers"]
    node = {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    container["command"] = ["python", "-c", SERVER]
    container["env"].append(node)
    container["readinessProbe"] = {"httpGet": {"port": 8000}, "periodSeconds": 1}
    container["securityContext"] = {
        "readOnlyRootFilesystem": True,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    container["volumeMounts"].append({"name": "tmp", "mountPath": "/tmp"})
    spec["volumes"].append({"name": "tmp", "emptyDir": {}})
    spec["securityContext"] = {"runAsUser": USER, "runAsGroup": USER, "runAsNonRoot": True}
    spec["terminationGracePeriodSeconds"] = 1
    spread = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname"}
    selector = {"labelSelector": {"matchLabels": LABELS}, "whenUnsatisfiable": "DoNotSchedule"}
    spec["topologySpreadConstraints"] = [spread | selector]
    template = {"metadata": {"labels": LABELS}, "spec": spec}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "echo"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": LABELS},
            "template": template,
        },
    }


def _ready_pods(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    pods = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return [pod for pod in pods if is_ready(pod)]


@pytest.fixture(scope="module")
def echo(cluster: Cluster) -> Iterator[str]:
    """A namespace with a deployment of three pods behind a service."""
    with fresh_namespace(cluster) as namespace:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
        cluster.api.request("POST", path, _deployment(3))
        spec = {"selector": LABELS, "ports": [{"port": 8000}]}
        service = {"metadata": {"name": "echo"}, "spec": spec}
        cluster.api.request("POST", f"/api/v1/namespaces/{namespace}/services", service)
        yield namespace


@pytest.fixture
def pods(cluster: Cluster, echo: str) -> list[dict[str, Any]]:
    """The deployment's pods, ready, in the order of their nodes."""
    wait_until(
        lambda: len(_ready_pods(cluster, echo)) == 3,
        90,
        "3 ready pods",
        explain=lambda: cluster.kubectl("describe", "pods", "-n", echo)[-3000:],
    )
    return sorted(_ready_pods(cluster, echo), key=lambda pod: str(pod["spec"]["nodeName"]))


def _fetch(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}:8000/", timeout=5) as answer:
        return str(answer.read().decode())


def _exec(cluster: Cluster, pod: dict[str, Any], *command: str) -> str:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    return cluster.kubectl("exec", "-n", namespace, name, "--", *command)


def _fetch_from(cluster: Cluster, pod: dict[str, Any], addresses: list[str]) -> list[str]:
    """Ask each address from inside a pod."""
    script = (
        "import sys, urllib.request as u\n"
        "for a in sys.argv[1:]: print(u.urlopen(f'http://{a}:8000/', timeout=5).read().decode())"
    )
    return _exec(cluster, pod, "python", "-c", script, *addresses).split()


def test_pods_talk_across_nodes_and_through_a_service(
    cluster: Cluster, echo: str, pods: list[dict[str, Any]]
) -> None:
    nodes = [pod["spec"]["nodeName"] for pod in pods]
    assert nodes == ["node1", "node2", "node3"]
    addresses = [pod["status"]["podIP"] for pod in pods]
    assert [_fetch(address) for address in addresses] == nodes
    for pod in pods:
        assert _fetch_from(cluster, pod, addresses) == nodes
    service = cluster.api.get(f"/api/v1/namespaces/{echo}/services/echo")["spec"]["clusterIP"]
    assert set(_fetch_from(cluster, pods[0], [service] * 5)) <= set(nodes)


def test_a_pod_runs_the_checkouts_python_as_an_unprivileged_user(
    cluster: Cluster, pods: list[dict[str, Any]]
) -> None:
    script = (
        "import os, getpass, moe_api, pydantic, tempfile; tempfile.TemporaryFile(); "
        "print(os.getuid(), getpass.getuser())"
    )
    assert _exec(cluster, pods[0], "python", "-c", script).split() == [str(USER), "moe"]
    with pytest.raises(CommandFailed, match="Read-only file system"):
        _exec(cluster, pods[0], "sh", "-c", "touch /here")
    with pytest.raises(CommandFailed, match="Read-only file system"):
        _exec(cluster, pods[0], "sh", "-c", "touch /usr/here")


def test_logs_and_port_forward(cluster: Cluster, echo: str, pods: list[dict[str, Any]]) -> None:
    name = pods[1]["metadata"]["name"]
    assert "serving on node2" in cluster.kubectl("logs", "-n", echo, name)
    with _port_forward(cluster, echo, name) as url, urllib.request.urlopen(url) as answer:
        assert answer.read() == b"node2"


@contextmanager
def _port_forward(cluster: Cluster, namespace: str, pod: str) -> Iterator[str]:
    """Yield a URL on this host that leads into the pod."""
    kubectl = str(cluster.binaries.bin / "kubectl")
    with subprocess.Popen(
        [kubectl, "port-forward", "-n", namespace, pod, ":8000"],
        env=cluster.environment(),
        stdout=subprocess.PIPE,
        text=True,
    ) as forward:
        assert forward.stdout is not None
        try:
            # "Forwarding from 127.0.0.1:PORT -> 8000"
            yield f"http://{forward.stdout.readline().split()[2]}/"
        finally:
            forward.terminate()


def test_nodes_have_their_labels(cluster: Cluster) -> None:
    for spec in cluster.spec.nodes:
        labels = cluster.api.get(f"/api/v1/nodes/{spec.name}")["metadata"]["labels"]
        assert labels[ZONE] == "zone-1"
        assert labels[RACK] == spec.labels[RACK]


def test_helm_and_kubectl_are_there(cluster: Cluster) -> None:
    assert json.loads(cluster.helm("list", "--all-namespaces", "--output", "json")) == []
    version = json.loads(cluster.kubectl("version", "--output", "json"))
    assert version["clientVersion"]["gitVersion"] == version["serverVersion"]["gitVersion"]


def test_a_frozen_container_answers_nothing_until_it_is_thawed(
    cluster: Cluster, echo: str, pods: list[dict[str, Any]]
) -> None:
    pod = pods[2]
    with faults.frozen(cluster, echo, pod["metadata"]["name"], "echo"):
        with pytest.raises(TimeoutError):
            _fetch(pod["status"]["podIP"])
    assert _fetch(pod["status"]["podIP"]) == "node3"


def test_a_crashed_container_is_restarted(
    cluster: Cluster, echo: str, pods: list[dict[str, Any]]
) -> None:
    name = pods[0]["metadata"]["name"]
    faults.crash(cluster, echo, name, "echo")

    def restarted() -> bool:
        pod = cluster.api.get(f"/api/v1/namespaces/{echo}/pods/{name}")
        return is_ready(pod) and pod["status"]["containerStatuses"][0]["restartCount"] == 1

    wait_until(restarted, 60, "the container's second life")


def test_a_cut_cable_is_seen_and_mended(cluster: Cluster, pods: list[dict[str, Any]]) -> None:
    with faults.cut_cable(cluster.node("node3")):
        _wait_for_nodes(cluster, lambda unready: unready == {"node3"})
        with pytest.raises(OSError, match=r"timed out|No route"):
            _fetch(pods[2]["status"]["podIP"])
    _wait_for_nodes(cluster, lambda unready: not unready)
    assert _fetch(pods[2]["status"]["podIP"]) == "node3"


def test_a_node_comes_back_after_a_power_loss(
    cluster: Cluster, echo: str, pods: list[dict[str, Any]]
) -> None:
    node = cluster.node("node2")
    with faults.power_loss(cluster, node):
        assert Cgroups.of_machine().processes(node.cgroup) == set()
        _wait_for_nodes(cluster, lambda unready: unready == {"node2"})
    assert cluster.problems() == []
    wait_until(lambda: len(_ready_pods(cluster, echo)) == 3, 90, "3 ready pods again")


def test_an_api_server_outage_does_not_stop_pods(
    cluster: Cluster, pods: list[dict[str, Any]]
) -> None:
    with faults.api_server_outage(cluster):
        assert not cluster.api.is_ready()
        assert _fetch(pods[0]["status"]["podIP"]) == "node1"
    assert cluster.api.is_ready()
    _wait_for_nodes(cluster, lambda unready: not unready)


def _wait_for_nodes(cluster: Cluster, as_wanted: Callable[[set[str]], bool]) -> None:
    names = {node.name for node in cluster.nodes}
    wait_until(lambda: as_wanted(cluster.api.unready_nodes(names)), 90, "the nodes' conditions")


def test_down_leaves_nothing_and_touches_no_other_cluster(cluster: Cluster) -> None:
    said: list[str] = []
    second = lifecycle.up("moetest2", with_nodes(1, gpus=4), said.append)
    try:
        assert second.url != cluster.url
        status = second.api.get("/api/v1/nodes/node1")["status"]
        assert status["allocatable"][GPU] == "4"
        assert lifecycle.up("moetest2", with_nodes(1, gpus=4), said.append) == second
        # What `up` wrote down is lost, as after a kill -9 half-way: names must do.
        second.instance.record.unlink()
    finally:
        lifecycle.down("moetest2", said.append)
    assert _traces(second.instance) == []
    assert cluster.problems() == []


def test_a_control_plane_that_lost_a_process_is_started_anew() -> None:
    said: list[str] = []
    name = f"t{time.monotonic_ns() % 10**6}"
    first = lifecycle.up(name, control_plane_only(), said.append)
    try:
        pid = processes.pid_of(first.instance.state, "etcd")
        assert pid is not None
        processes.send(pid, 9)
        wait_until(lambda: bool(first.problems()), 10, "the loss to be seen")
        second = lifecycle.up(name, control_plane_only(), said.append)
        assert second.token != first.token
        assert second.problems() == []
        assert any("etcd has ended" in line for line in said)
    finally:
        lifecycle.down(name, said.append)
    assert _traces(first.instance) == []


def test_a_cluster_ends_with_the_program_that_holds_it() -> None:
    instance = Instance.named(f"t{time.monotonic_ns() % 10**6}")
    # Waits for its holder's first line, and then for ever.
    program = (
        "import subprocess, sys, time\n"
        "holder = subprocess.Popen([sys.executable, '-m', 'devcluster', 'hold', '--name',\n"
        f"    '{instance.name}', '--control-plane-only'], stdin=subprocess.PIPE,\n"
        "    stdout=subprocess.PIPE, start_new_session=True)\n"
        "print(holder.stdout.readline().decode(), end='', flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=CHECKOUT, stdout=subprocess.PIPE, text=True
    ) as user:
        assert user.stdout is not None
        try:
            assert user.stdout.readline() == "ready\n"
            assert processes.marked(instance.state)
        finally:
            user.kill()
    wait_until(lambda: not instance.lock.exists(), 60, "the holder to clean up")
    assert _traces(instance) == []


def _traces(instance: Instance) -> list[str]:
    """Whatever on this machine still carries the instance's name."""
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    rules = subprocess.run(["iptables", "-S"], capture_output=True, text=True).stdout.splitlines()
    return [
        *(f"process {pid}" for pid in processes.marked(instance.state)),
        *network.left_behind(instance),
        *(["cgroup"] if Cgroups.of_machine().exists(instance.cgroup) else []),
        *(line for line in mounts if str(instance.state) in line),
        *(line for line in rules if instance.rule_comment in line.split()),
        *([str(instance.state)] if instance.state.exists() else []),
    ]
