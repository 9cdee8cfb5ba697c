"""What a node's daemons are told: plain documents, all of their files below the node's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from devcluster.images import PAUSE_IMAGE


def cni_config(pods: str, folder: Path) -> dict[str, Any]:
    """Pods hang on a bridge inside the node and get addresses from the node's own subnet."""
    addresses = {
        "type": "host-local",
        "dataDir": str(folder),
        "ranges": [[{"subnet": pods}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": addresses,
    }
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}


def containerd_config(folder: Path, socket: Path, cni_plugins: Path, runc: str) -> str:
    """containerd's settings; `restrict_oom_score_adj` lets it work without CAP_SYS_RESOURCE."""
    return f"""\
version = 2
root = "{folder}/containerd"
state = "{folder}/run"
[grpc]
  address = "{socket}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  disable_tcp_service = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{cni_plugins}"
    conf_dir = "{folder}/cni.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter(folder)}"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        BinaryName = "{runc}"
"""


def kubelet_config(folder: Path, socket: Path, cgroup: str) -> dict[str, Any]:
    """The kubelet's settings: quick to report, slow to clean up, all files below `folder`."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "0.0.0.0",
        # Only this host and the pods reach the node's address.
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{socket}",
        "podLogsDir": f"{folder}/logs",
        "volumePluginDir": f"{folder}/volume-plugins",
        "resolvConf": "",  # there is no DNS server
        "enforceNodeAllocatable": [],
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {
            "memory.available": "50Mi",
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
        },
        "nodeStatusUpdateFrequency": "2s",
        "nodeStatusReportFrequency": "5s",
        "nodeLeaseDurationSeconds": 8,
        "serializeImagePulls": False,
        "healthzBindAddress": "127.0.0.1",
        "readOnlyPort": 0,
    }


def snapshotter(folder: Path) -> str:
    """How containerd stacks layers: an overlay cannot lie on an overlay (as inside a container)."""
    return (
        "native"
        if filesystem_of(folder, Path("/proc/self/mountinfo").read_text()) == "overlay"
        else "overlayfs"
    )


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds `path`, from the text of a mountinfo file."""
    found, length = "", -1
    for line in mountinfo.splitlines():
        fields, _, source = line.partition(" - ")
        mount = Path(fields.split()[4])
        # Later lines cover earlier ones.
        if path.is_relative_to(mount) and len(mount.parts) >= length:
            found, length = source.split()[0], len(mount.parts)
    return found
