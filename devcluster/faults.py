"""Faults for tests: a cut cable, a power loss, a process that hangs or dies, an API outage."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from devcluster import controlplane, processes
from devcluster.cgroups import Cgroups
from devcluster.cluster import Cluster
from devcluster.command import run
from devcluster.errors import NotRunning
from devcluster.lifecycle import restart_node
from devcluster.node import Node


@contextmanager
def cut_cable(node: Node) -> Iterator[None]:
    """No packet reaches or leaves the node; everything on it goes on running."""
    run("ip", "link", "set", node.link, "down")
    try:
        yield
    finally:
        run("ip", "link", "set", node.link, "up")


@contextmanager
def power_loss(cluster: Cluster, node: Node) -> Iterator[None]:
    """Every process of the node is gone at once; afterwards the node is started again."""
    Cgroups.of_machine().kill(node.cgroup)
    try:
        yield
    finally:
        restart_node(cluster, node)


@contextmanager
def api_server_outage(cluster: Cluster) -> Iterator[None]:
    """The API server is not there; afterwards it is ready again."""
    processes.kill(cluster.instance.state, controlplane.API_SERVER)
    try:
        yield
    finally:
        cluster.control_plane.start_api_server(cluster.api)


@contextmanager
def frozen(cluster: Cluster, namespace: str, pod: str, container: str) -> Iterator[None]:
    """The container's processes hang: they keep memory and connections and do nothing."""
    pids = container_processes(cluster, namespace, pod, container)
    for pid in pids:
        processes.send(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            processes.send(pid, signal.SIGCONT)


def crash(cluster: Cluster, namespace: str, pod: str, container: str) -> None:
    """Kill the container's processes, as the kernel does when memory runs out."""
    for pid in container_processes(cluster, namespace, pod, container):
        processes.send(pid, signal.SIGKILL)


def container_processes(cluster: Cluster, namespace: str, pod: str, container: str) -> list[int]:
    """Host process ids of a running container, sorted; raises NotRunning when it has none."""
    found = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
    cgroups = Cgroups.of_machine()
    for status in found.get("status", {}).get("containerStatuses", []):
        container_id = status.get("containerID", "").removeprefix("containerd://")
        if status["name"] == container and container_id:
            node = cluster.node(found["spec"]["nodeName"])
            pids = cgroups.processes_below(node.cgroup, container_id)
            if pids:
                return sorted(pids)
    raise NotRunning(f"container {container!r} of pod {namespace}/{pod} has no process")
