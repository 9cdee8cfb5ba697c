"""Bringing a cluster up and taking it down, each of which may be done twice or be interrupted."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from devcluster import credentials, images, network, processes
from devcluster.build import Binaries, build
from devcluster.cgroups import Cgroups
from devcluster.cluster import Cluster
from devcluster.debian import require_programs
from devcluster.errors import ClusterError, NotRunning
from devcluster.instance import Instance
from devcluster.lock import locked
from devcluster.node import PRIVATE_FOLDERS, Node
from devcluster.progress import Say
from devcluster.spec import GPU, ClusterSpec
from devcluster.waiting import wait_until

CHANGE_SECONDS = 300
NODES_READY_SECONDS = 120
# Held while addresses are picked and shared folders made or removed, by all instances of root.
MACHINE_LOCK = Path("/run/moe-devcluster.lock")


def up(name: str, spec: ClusterSpec, say: Say) -> Cluster:
    """Return a healthy cluster: the one that runs, when it is as wanted, else a new one.

    Whatever ends this early, Ctrl-C included, leaves nothing behind but a failure's logs.
    """
    instance = Instance.named(name)
    require_programs(bool(spec.nodes), say)
    built = build(say)
    with _changing(instance, say):
        running = _reusable(instance, spec, built, say)
        if running is not None:
            say(f"cluster {name!r} is running already")
            return running
        _remove(instance)
        try:
            return _start(instance, spec, built, say)
        except BaseException as error:
            kept = _keep_logs(instance) if isinstance(error, Exception) else ""
            say(f"taking down what was started{kept}")
            _remove(instance)
            raise


def down(name: str, say: Say) -> None:
    """Remove everything that carries the instance's name; fine when there is nothing."""
    instance = Instance.named(name)
    with _changing(instance, say):
        _remove(instance)
        shutil.rmtree(instance.failed_logs, ignore_errors=True)
        instance.lock.unlink()
    say(f"cluster {name!r} is gone")


def restart_node(cluster: Cluster, node: Node) -> None:
    """Start a node again after its power was cut; returns when it is Ready."""
    cgroups = Cgroups.of_machine()
    node.start_holder(cgroups)
    node.start_containerd(cgroups)
    node.import_images(_archives(cluster))
    node.start_kubelet(cgroups, cluster.control_plane.credentials)
    _await_nodes(cluster)


def _changing(instance: Instance, say: Say) -> AbstractContextManager[None]:
    what = f"another command that changes cluster {instance.name!r}"
    return locked(instance.lock, CHANGE_SECONDS, say, what)


def _reusable(instance: Instance, spec: ClusterSpec, built: Binaries, say: Say) -> Cluster | None:
    try:
        cluster = Cluster.load(instance.name)
    except NotRunning:
        return None
    problems = cluster.problems()
    if cluster.spec != spec:
        problems.append("other nodes are wanted")
    if cluster.binaries != built:
        problems.append("the cluster binary has changed")
    if not problems:
        return cluster
    say(f"starting cluster {instance.name!r} anew: {'; '.join(problems)}")
    return None


def _start(instance: Instance, spec: ClusterSpec, built: Binaries, say: Say) -> Cluster:
    instance.state.mkdir(parents=True)
    say(f"starting cluster {instance.name!r} in {instance.state}")
    if spec.nodes:
        return _start_with_nodes(instance, spec, built, say)
    cluster = _plan(instance, spec, built, None)
    cluster.control_plane.start_store()
    _start_control_plane(cluster, say)
    _await_service_accounts(cluster)
    say("controllers at work")
    cluster.save()
    return cluster


def _start_with_nodes(instance: Instance, spec: ClusterSpec, built: Binaries, say: Say) -> Cluster:
    cgroups = Cgroups.of_machine()
    with locked(MACHINE_LOCK, CHANGE_SECONDS, say, "another cluster of this machine"):
        addresses = network.pick_slice(network.routed_networks())
        network.create_bridge(instance, addresses)
        cluster = _plan(instance, spec, built, addresses)
        cluster.control_plane.start_store()
        for node in cluster.nodes:
            node.start_holder(cgroups)
    say(f"nodes: {len(cluster.nodes)} on {addresses.nodes} (cgroup v{cgroups.version})")
    archives = _write_archives(cluster)
    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        prepared = [
            pool.submit(_prepare_containers, node, cgroups, archives) for node in cluster.nodes
        ]
        _start_control_plane(cluster, say)
        for outcome in prepared:
            outcome.result()
    say("containerd has its images")
    for node in cluster.nodes:
        node.start_kubelet(cgroups, cluster.control_plane.credentials)
    _await_service_accounts(cluster)
    _await_nodes(cluster)
    _label_nodes(cluster)
    say(f"nodes Ready: {len(cluster.nodes)}")
    cluster.save()
    return cluster


def _plan(
    instance: Instance, spec: ClusterSpec, built: Binaries, addresses: network.Addresses | None
) -> Cluster:
    """Decide ports and write credentials."""
    api_port, etcd_port, peer_port = network.free_ports(3)
    cluster = Cluster(instance, spec, built, addresses, (api_port, etcd_port, peer_port), "")
    plane = cluster.control_plane
    nodes = [node.name for node in spec.nodes]
    token = credentials.create(plane.credentials.folder, plane.host, plane.url, nodes)
    return Cluster(instance, spec, built, addresses, cluster.ports, token)


def _start_control_plane(cluster: Cluster, say: Say) -> None:
    plane = cluster.control_plane
    plane.start_api_server(cluster.api)
    say(f"API server ready at {cluster.url}")
    plane.start_controllers()


def _await_service_accounts(cluster: Cluster) -> None:
    """Wait for the controllers' first work: without it no pod can be made."""
    names = cluster.control_plane.process_names
    wait_until(
        lambda: cluster.api.exists("/api/v1/namespaces/default/serviceaccounts/default"),
        60,
        "the controllers to make the default service account",
        check=lambda: processes.require(cluster.instance.state, names),
    )


def _prepare_containers(node: Node, cgroups: Cgroups, archives: list[Path]) -> None:
    node.start_containerd(cgroups)
    node.import_images(archives)


def _archives(cluster: Cluster) -> list[Path]:
    return [cluster.instance.state / "images" / name for name in ("host.tar", "pause.tar")]


def _write_archives(cluster: Cluster) -> list[Path]:
    host, pause = _archives(cluster)
    host.parent.mkdir()
    host.write_bytes(
        images.archive(
            (images.HOST_IMAGE, images.SAME_HOST_IMAGE), images.host_entries(), ["/bin/sh"]
        )
    )
    pause.write_bytes(
        images.archive(
            (images.PAUSE_IMAGE,), images.pause_entries(cluster.binaries.pause), ["/pause"]
        )
    )
    return [host, pause]


def _await_nodes(cluster: Cluster) -> None:
    names = {node.name for node in cluster.nodes}

    def explain() -> str:
        unready = sorted(cluster.api.unready_nodes(names))
        logs = cluster.instance.state / "logs"
        return f"not Ready: {', '.join(unready)}; see {logs}/NODE-kubelet.log"

    wait_until(
        lambda: not cluster.api.unready_nodes(names),
        NODES_READY_SECONDS,
        "the nodes to be Ready",
        check=lambda: processes.require(cluster.instance.state, cluster.process_names),
        explain=explain,
        interval_seconds=0.2,
    )


def _label_nodes(cluster: Cluster) -> None:
    """Set labels, and advertise GPUs as extended resources in the nodes' status."""
    for spec in cluster.spec.nodes:
        path = f"/api/v1/nodes/{spec.name}"
        cluster.api.patch(path, {"metadata": {"labels": dict(spec.labels)}})
        if spec.gpus:
            amount = {GPU: str(spec.gpus)}
            status = {"capacity": amount, "allocatable": amount}
            cluster.api.patch(f"{path}/status", {"status": status})


def _remove(instance: Instance) -> None:
    """Everything by its name; no record is needed, so a half-made instance goes as well."""
    processes.kill_all(
        lambda: processes.marked(instance.state), 20, f"the processes of {instance.name!r}"
    )
    if os.geteuid() == 0:
        _remove_nodes(instance)
    _remove_state(instance)


def _remove_nodes(instance: Instance) -> None:
    cgroups = Cgroups.of_machine()
    if cgroups.exists(instance.cgroup):
        cgroups.kill(instance.cgroup)
        cgroups.remove(instance.cgroup)
    network.remove(instance)
    left = network.left_behind(instance)
    if left:
        raise ClusterError(f"cannot remove the network links {', '.join(left)}")
    with locked(MACHINE_LOCK, CHANGE_SECONDS, lambda _: None, "another cluster of this machine"):
        if not cgroups.groups("devcluster-"):
            _remove_private_folders()


def _remove_private_folders() -> None:
    """The empty mount points of the nodes. One that a node still uses would lose its mount."""
    for folder in PRIVATE_FOLDERS:
        if Path(folder).is_dir() and not os.listdir(folder):
            os.rmdir(folder)


def _remove_state(instance: Instance) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    if f" {instance.state}/" in mounts:
        raise ClusterError(f"file systems are mounted below {instance.state}; unmount them first")
    if instance.state.exists():
        shutil.rmtree(instance.state)


def _keep_logs(instance: Instance) -> str:
    """Move the logs out of the state folder; returns a phrase that says where they are."""
    logs = instance.state / "logs"
    if not logs.is_dir():
        return ""
    kept = instance.failed_logs
    shutil.rmtree(kept, ignore_errors=True)
    logs.rename(kept)
    return f"; its logs are in {kept}"
