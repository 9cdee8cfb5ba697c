"""Detached processes are found by their mark, ended for good, and missed with their last words."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from devcluster import processes
from devcluster.errors import ComponentDied
from devcluster.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    processes.kill_all(lambda: processes.marked(tmp_path), 10, "what the test started")


def test_a_process_and_its_children_are_found_and_ended(state: Path) -> None:
    # A child of its own session, as containerd's shims are, after its parent has gone.
    pid = processes.start(state, "parent", ["sh", "-c", "setsid sleep 600 & exec sleep 600"])
    assert processes.pid_of(state, "parent") == pid
    assert pid not in processes.marked(state.parent)
    wait_until(lambda: len(processes.marked(state)) == 2, 10, "the child")
    processes.kill(state, "parent")
    assert processes.pid_of(state, "parent") is None
    [child] = processes.marked(state)
    processes.kill_all(lambda: processes.marked(state), 10, "the child")
    assert not Path(f"/proc/{child}/exe").exists()


def test_a_reused_process_id_is_not_ours(state: Path) -> None:
    processes.start(state, "short", ["true"])
    (state / "pids" / "short").write_text(f"{os.getpid()}\n")
    assert processes.pid_of(state, "short") is None


def test_an_ended_process_is_missed_with_the_end_of_its_log(state: Path) -> None:
    processes.start(state, "short", ["sh", "-c", "echo last words >&2"])
    wait_until(lambda: processes.pid_of(state, "short") is None, 10, "its end")
    with pytest.raises(ComponentDied, match=r"short has ended.*short\.log:\n    last words"):
        processes.require(state, ["short"])


def test_only_a_living_program_may_be_in_exec() -> None:
    fields = "1 1 1 0 -1 {flags} 0"
    line = "42 (a (strange) name) {state} " + fields
    assert processes._may_be_in_exec(line.format(state="R", flags=4194560))
    assert not processes._may_be_in_exec(line.format(state="Z", flags=4194560))
    assert not processes._may_be_in_exec(line.format(state="I", flags=processes.PF_KTHREAD))
