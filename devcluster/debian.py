"""The programs of other people that a cluster needs, and the Debian packages they come in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from devcluster.command import SEARCH_PATH
from devcluster.errors import Unsupported
from devcluster.node import CNI_FOLDERS
from devcluster.progress import Say

CONTROL_PLANE_PROGRAMS = {"openssl": "openssl", "setsid": "util-linux"}
NODE_PROGRAMS = {
    "containerd": "containerd",
    "ctr": "containerd",
    "hostname": "hostname",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nsenter": "util-linux",
    "runc": "runc",
    "unshare": "util-linux",
}
CNI_PACKAGE = "containernetworking-plugins"


def require_programs(nodes: bool, say: Say) -> None:
    """Install what is missing when that is possible; else raise Unsupported with the command.

    `nodes` says whether nodes are wanted, or the control plane alone.
    """
    if not sys.platform.startswith("linux"):
        raise Unsupported("the cluster runs on Linux only")
    if nodes and os.geteuid() != 0:
        raise Unsupported("a cluster with nodes needs root: run as root, or with sudo")
    packages = missing_packages(nodes)
    if not packages:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *packages]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unsupported(f"missing programs; as root: `{' '.join(command)}` (Debian's names)")
    say(f"installing Debian packages: {' '.join(packages)}")
    _apt_get("update")
    _apt_get(*command[1:])
    still = missing_packages(nodes)
    if still:
        raise Unsupported(f"apt-get installed {' '.join(still)}, but their programs are missing")


def missing_packages(
    nodes: bool,
    has_program: Callable[[str], bool] = lambda name: bool(shutil.which(name, path=SEARCH_PATH)),
    cni_folders: Iterable[Path] = CNI_FOLDERS,
) -> list[str]:
    """The packages whose programs this machine lacks, sorted."""
    needed = CONTROL_PLANE_PROGRAMS | (NODE_PROGRAMS if nodes else {})
    missing = {package for program, package in needed.items() if not has_program(program)}
    if nodes and not any((folder / "bridge").exists() for folder in cni_folders):
        missing.add(CNI_PACKAGE)
    return sorted(missing)


def _apt_get(*arguments: str) -> None:
    # Another apt-get may be at work, for instance on a machine that has just started.
    argv = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "--quiet", "--quiet", *arguments]
    done = subprocess.run(
        argv,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise Unsupported(f"`{' '.join(argv)}` failed: {(done.stderr or done.stdout)[-2000:]}")
