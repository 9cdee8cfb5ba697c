"""One node: a network, mount and host name of its own, with containerd, kubelet and kube-proxy.

A sleeping process, the holder, keeps the namespaces; the daemons enter them. All of the node's
processes are in its cgroup, the containers' included, so that it can be ended as a whole.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from devcluster import credentials, network, processes
from devcluster.cgroups import Cgroups
from devcluster.command import SEARCH_PATH, run, succeeds
from devcluster.credentials import Credentials
from devcluster.errors import Unsupported
from devcluster.instance import Instance
from devcluster.network import Addresses
from devcluster.node_settings import cni_config, containerd_config, kubelet_config, snapshotter
from devcluster.waiting import wait_until

CNI_FOLDERS = (Path("/usr/lib/cni"), Path("/opt/cni/bin"))
# Daemons write here whatever their settings say, so each node gets an empty folder of its own.
PRIVATE_FOLDERS = ("/run", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")


@dataclass(frozen=True)
class Node:
    """One node of an instance; `number` counts from 1 and decides its addresses."""

    instance: Instance
    addresses: Addresses
    kube: Path
    name: str
    number: int
    num_nodes: int

    @property
    def folder(self) -> Path:
        return self.instance.state / "nodes" / self.name

    @property
    def address(self) -> str:
        return self.addresses.node(self.number)

    @property
    def link(self) -> str:
        """The host's end of this node's cable."""
        return self.instance.link(self.number)

    @property
    def cgroup(self) -> str:
        return self.instance.node_cgroup(self.name)

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    @property
    def holder(self) -> str:
        return f"{self.name}-holder"

    @property
    def process_names(self) -> list[str]:
        return [
            self.holder,
            *(f"{self.name}-{part}" for part in ("containerd", "kubelet", "proxy")),
        ]

    def start_holder(self, cgroups: Cgroups) -> None:
        """Make the namespaces, lay the cable and configure the network inside."""
        cgroups.create(self.cgroup)
        for private in PRIVATE_FOLDERS:
            Path(private).mkdir(parents=True, exist_ok=True)
        prepared = self.folder / "prepared"
        prepared.parent.mkdir(parents=True, exist_ok=True)
        prepared.unlink(missing_ok=True)
        script = [
            f"hostname {self.name}",
            *(f"mount -t tmpfs -o mode=755 tmpfs {private}" for private in PRIVATE_FOLDERS),
            "ip link set lo up",
            "echo 1 > /proc/sys/net/ipv4/ip_forward",
            f"touch {prepared}",
            "exec sleep infinity",
        ]
        unshare = ["unshare", "--net", "--mount", "--uts", "--propagation", "private"]
        pid = processes.start(
            self.instance.state,
            self.holder,
            [*unshare, "sh", "-ec", "\n".join(script)],
            joins=cgroups.processes_file(self.cgroup),
        )
        wait_until(prepared.exists, 15, f"the namespaces of {self.name}", check=self._holder_lives)
        network.connect(self.instance, self.addresses, self.number, pid)
        commands = network.node_commands(self.addresses, self.number, self.num_nodes)
        run(*self._enter(), "sh", "-ec", "\n".join(commands))

    def start_containerd(self, cgroups: Cgroups) -> None:
        shutil.rmtree(self.folder / "run", ignore_errors=True)  # of a life before a power loss
        (self.folder / "cni.d").mkdir(exist_ok=True)
        (self.folder / "cni.d" / "10-pods.conflist").write_text(
            json.dumps(cni_config(self.addresses.node_pods(self.number), self.folder / "cni"))
        )
        (self.folder / "containerd.toml").write_text(
            containerd_config(self.folder, self.socket, _cni_plugins(), _program("runc"))
        )
        command = ["containerd", "--config", str(self.folder / "containerd.toml")]
        self._start_inside("containerd", command, cgroups)

    def import_images(self, archives: list[Path]) -> None:
        """Wait for containerd, then give it the images."""
        ctr = ["ctr", "--address", str(self.socket), "--namespace", "k8s.io"]
        wait_until(
            lambda: self.socket.exists() and succeeds(*ctr, "version"),
            30,
            f"containerd of {self.name}",
            check=lambda: processes.require(self.instance.state, [f"{self.name}-containerd"]),
        )
        snapshots = ["--snapshotter", snapshotter(self.folder)]
        for archive in archives:
            run(*ctr, "images", "import", *snapshots, archive)

    def start_kubelet(self, cgroups: Cgroups, files: Credentials) -> None:
        """Start kubelet and kube-proxy."""
        settings = kubelet_config(self.folder, self.socket, self.cgroup)
        (self.folder / "kubelet.json").write_text(json.dumps(settings, indent=1))
        kubelet = [
            *(str(self.kube), "kubelet"),
            f"--config={self.folder / 'kubelet.json'}",
            f"--kubeconfig={files.kubeconfig(self.name)}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'pki'}",
        ]
        self._start_inside("kubelet", kubelet, cgroups)
        proxy = [
            *(str(self.kube), "kube-proxy"),
            f"--kubeconfig={files.kubeconfig(credentials.PROXY)}",
            f"--hostname-override={self.name}",
            f"--cluster-cidr={self.addresses.pods}",
            "--proxy-mode=iptables",
            # These are settings of the whole machine, not of this node.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0",
            "--conntrack-tcp-timeout-close-wait=0",
        ]
        self._start_inside("proxy", proxy, cgroups)

    def _start_inside(self, part: str, command: list[str], cgroups: Cgroups) -> None:
        processes.start(
            self.instance.state,
            f"{self.name}-{part}",
            [*self._enter(), *command],
            joins=cgroups.processes_file(self.cgroup),
        )

    def _enter(self) -> list[str]:
        """Words before a command that is to run inside the node."""
        self._holder_lives()
        pid = processes.pid_of(self.instance.state, self.holder)
        # Not `ip netns exec`: it mounts another /sys, without the cgroups.
        return ["nsenter", "--target", str(pid), "--net", "--mount", "--uts", "--"]

    def _holder_lives(self) -> None:
        processes.require(self.instance.state, [self.holder])


def _cni_plugins() -> Path:
    for folder in CNI_FOLDERS:
        if (folder / "bridge").exists():
            return folder
    raise Unsupported(f"no CNI plug-ins in {' or '.join(map(str, CNI_FOLDERS))}")


def _program(name: str) -> str:
    found = shutil.which(name, path=SEARCH_PATH)
    if found is None:
        raise Unsupported(f"{name} is not installed")
    return found
