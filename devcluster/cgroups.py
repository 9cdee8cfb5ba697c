"""The kernel's control groups, in both layouts.

Version 1 has one tree per controller (/sys/fs/cgroup/memory, …/pids, …), version 2 a single tree.
Every node gets a group of its own: the kubelet puts its pods there, and ending all processes in it
is a power loss. Version 2 is written from the kernel's documentation and has only unit tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from devcluster import processes
from devcluster.errors import Unsupported
from devcluster.waiting import wait_until

ROOT = Path("/sys/fs/cgroup")
# The inner groups of version 2 may not hold processes, so daemons get a leaf of their own.
DAEMONS = "daemons"
V2_CONTROLLERS = ("cpuset", "cpu", "io", "memory", "pids", "hugetlb")


@dataclass(frozen=True)
class Cgroups:
    """The machine's control groups; group names are relative paths such as "a/b"."""

    root: Path
    version: Literal[1, 2]

    @classmethod
    def of_machine(cls, root: Path = ROOT) -> Cgroups:
        """Raises Unsupported when no known layout is mounted at `root`."""
        if (root / "cgroup.controllers").is_file():
            return cls(root, 2)
        if (root / "pids").is_dir():
            return cls(root, 1)
        raise Unsupported(f"{root} holds neither cgroup v2 nor a v1 pids controller")

    def trees(self) -> list[Path]:
        """The top folder of each tree; links (v1: cpu → cpu,cpuacct) are left out."""
        if self.version == 2:
            return [self.root]
        return sorted(
            entry for entry in self.root.iterdir() if entry.is_dir() and not entry.is_symlink()
        )

    def processes_file(self, group: str) -> Path:
        """Writing a process id here puts the process into the group's daemons."""
        tree = self.root if self.version == 2 else self.root / "pids"
        return tree / group / DAEMONS / "cgroup.procs"

    def create(self, group: str) -> None:
        """Make the group in every tree, ready for a kubelet's pods and for daemons."""
        for tree in self.trees():
            folder = tree
            for part in group.split("/"):
                if self.version == 2:
                    _pass_controllers_on(folder)
                parent, folder = folder, folder / part
                folder.mkdir(exist_ok=True)
                _inherit_cpuset(parent, folder)
            if self.version == 2:
                _pass_controllers_on(folder)
        self.processes_file(group).parent.mkdir(exist_ok=True)

    def processes(self, group: str) -> set[int]:
        """Ids of all processes in the group and below it."""
        found: set[int] = set()
        for tree in self.trees():
            for folder, _, _ in os.walk(tree / group):
                found |= _read_ids(Path(folder) / "cgroup.procs")
        return found

    def processes_below(self, group: str, name: str) -> set[int]:
        """Ids of all processes in the groups of this name, however deep below `group`."""
        found: set[int] = set()
        for tree in self.trees():
            for top, names, _ in os.walk(tree / group):
                if name in names:
                    found |= _read_ids(Path(top) / name / "cgroup.procs")
        return found

    def kill(self, group: str, seconds: float = 20) -> None:
        """End every process in the group at once, as if its power were cut."""
        switch = self.root / group / "cgroup.kill"
        if self.version == 2 and switch.is_file():
            switch.write_text("1")
        processes.kill_all(lambda: self.processes(group), seconds, f"cgroup {group}")

    def remove(self, group: str, seconds: float = 10) -> None:
        """Remove the emptied group and those below it; the kernel may need a moment."""
        for tree in self.trees():
            top = tree / group
            wait_until(partial(_remove_folders, top), seconds, f"cgroup {top} to be free")

    def groups(self, prefix: str) -> set[str]:
        """Top groups whose names begin like this, of all instances."""
        return {folder.name for tree in self.trees() for folder in tree.glob(f"{prefix}*")}

    def exists(self, group: str) -> bool:
        return any((tree / group).is_dir() for tree in self.trees())


def _pass_controllers_on(folder: Path) -> None:
    """Version 2: let the groups below this one use the controllers that it has."""
    offered = (folder / "cgroup.controllers").read_text().split()
    wanted = [f"+{controller}" for controller in V2_CONTROLLERS if controller in offered]
    if not wanted:
        return
    try:
        (folder / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        raise Unsupported(
            f"cannot hand controllers down from {folder} ({error}): processes live in it; "
            "run outside a container, or in one whose own processes are in a sub-group"
        ) from error


def _inherit_cpuset(parent: Path, folder: Path) -> None:
    """Version 1: a new cpuset is empty, and no process may enter it, until it is filled."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        own = folder / name
        if own.is_file() and not own.read_text().strip() and (parent / name).is_file():
            own.write_text((parent / name).read_text())


def _read_ids(file: Path) -> set[int]:
    try:
        return {int(word) for word in file.read_text().split()}
    except (FileNotFoundError, OSError):  # gone meanwhile, or a threaded group of v2
        return set()


def _remove_folders(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        try:
            os.rmdir(folder)
        except FileNotFoundError:
            continue
        except OSError:
            return False
    return True
