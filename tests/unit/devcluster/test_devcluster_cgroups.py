"""Cgroup paths in both layouts, on folders that look like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from devcluster.cgroups import Cgroups
from devcluster.errors import Unsupported


@pytest.fixture
def v1_root(tmp_path: Path) -> Path:
    for controller in ("cpu,cpuacct", "cpuset", "memory", "pids"):
        (tmp_path / controller).mkdir()
    (tmp_path / "cpu").symlink_to("cpu,cpuacct")
    for name, value in (("cpuset.cpus", "0-1\n"), ("cpuset.mems", "0\n")):
        (tmp_path / "cpuset" / name).write_text(value)
    return tmp_path


@pytest.fixture
def v2_root(tmp_path: Path) -> Path:
    """The kernel puts its control files into each new group; a plain file system does not."""
    for group in ("", "devcluster-moe", "devcluster-moe/node1"):
        folder = tmp_path / group
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.controllers").write_text("cpuset cpu memory pids misc\n")
    return tmp_path


def test_v1_group_is_made_in_every_tree_and_not_behind_links(v1_root: Path) -> None:
    cgroups = Cgroups.of_machine(v1_root)
    cgroups.create("devcluster-moe/node1")
    assert cgroups.version == 1
    made = sorted(
        str(path.relative_to(v1_root)) for path in v1_root.rglob("node1") if path.is_dir()
    )
    assert made == [
        f"{tree}/devcluster-moe/node1" for tree in ("cpu,cpuacct", "cpuset", "memory", "pids")
    ]
    assert [tree.name for tree in cgroups.trees()] == ["cpu,cpuacct", "cpuset", "memory", "pids"]


def test_v1_daemons_join_the_pids_controller(v1_root: Path) -> None:
    joins = Cgroups.of_machine(v1_root).processes_file("devcluster-moe/node1")
    assert joins == v1_root / "pids/devcluster-moe/node1/daemons/cgroup.procs"


def test_v1_new_cpuset_takes_over_what_its_parent_has(v1_root: Path) -> None:
    # The kernel makes the empty files together with the folder.
    folder = v1_root / "cpuset" / "devcluster-moe"
    folder.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        (folder / name).touch()
    Cgroups.of_machine(v1_root).create("devcluster-moe")
    assert (folder / "cpuset.cpus").read_text() == "0-1\n"
    assert (folder / "cpuset.mems").read_text() == "0\n"


def test_v2_daemons_get_a_leaf_and_inner_groups_pass_controllers_on(v2_root: Path) -> None:
    cgroups = Cgroups.of_machine(v2_root)
    cgroups.create("devcluster-moe/node1")
    assert cgroups.version == 2
    joins = cgroups.processes_file("devcluster-moe/node1")
    assert joins == v2_root / "devcluster-moe/node1/daemons/cgroup.procs"
    assert joins.parent.is_dir()
    for group in ("", "devcluster-moe", "devcluster-moe/node1"):
        passed_on = (v2_root / group / "cgroup.subtree_control").read_text()
        assert passed_on == "+cpuset +cpu +memory +pids"
    assert not (joins.parent / "cgroup.subtree_control").exists()


def test_processes_are_collected_from_all_levels(v1_root: Path) -> None:
    pod = v1_root / "memory/devcluster-moe/node1/kubepods/pod7/abc"
    pod.mkdir(parents=True)
    (pod / "cgroup.procs").write_text("71\n72\n")
    daemons = v1_root / "pids/devcluster-moe/node1/daemons"
    daemons.mkdir(parents=True)
    (daemons / "cgroup.procs").write_text("5\n")
    cgroups = Cgroups.of_machine(v1_root)
    assert cgroups.processes("devcluster-moe") == {5, 71, 72}
    assert cgroups.processes_below("devcluster-moe", "abc") == {71, 72}
    assert cgroups.processes("devcluster-other") == set()


def test_remove_takes_the_group_out_of_every_tree(v1_root: Path) -> None:
    cgroups = Cgroups.of_machine(v1_root)
    cgroups.create("devcluster-moe/node1")
    cgroups.create("devcluster-moetest/node1")
    assert cgroups.groups("devcluster-") == {"devcluster-moe", "devcluster-moetest"}
    cgroups.remove("devcluster-moe")
    assert not cgroups.exists("devcluster-moe")
    assert cgroups.groups("devcluster-") == {"devcluster-moetest"}


def test_a_machine_without_cgroups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=str(tmp_path)):
        Cgroups.of_machine(tmp_path)
