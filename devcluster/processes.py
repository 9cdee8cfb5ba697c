"""Processes that outlive the command that started them, and can always be found again.

Each one carries the instance's state folder in its environment (children inherit it), so that a
scan of /proc finds all of them, whatever happened to the process that started them. Containers
do not inherit it: they are found by their cgroup (`devcluster.cgroups`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from devcluster.command import SEARCH_PATH
from devcluster.errors import ComponentDied
from devcluster.waiting import wait_until

MARK = "DEVCLUSTER_STATE"
TAIL_LINES = 15
EXEC_SECONDS = 0.5
PF_KTHREAD = 0x00200000  # <linux/sched.h>, in the flags of /proc/PID/stat
# Joins its cgroup and notes its process id before it becomes the program.
LAUNCH = 'if [ -n "$1" ]; then echo $$ > "$1" || exit 1; fi; echo $$ > "$2"; shift 2; exec "$@"'


def start(state: Path, name: str, argv: Sequence[str | Path], joins: Path | None = None) -> int:
    """Start a detached process and return its id.

    `joins` is a cgroup's cgroup.procs file. Output is appended to the process's log.
    """
    pid_file, log = _pid_file(state, name), log_file(state, name)
    pid_file.parent.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    pid_file.unlink(missing_ok=True)
    launch = ["setsid", "--fork", "sh", "-c", LAUNCH, "sh", str(joins or ""), str(pid_file)]
    # A small environment: a proxy's variables, for instance, would lead the components astray.
    environment = {
        "PATH": SEARCH_PATH,
        "HOME": os.environ.get("HOME", "/"),
        MARK: str(state),
    }
    with log.open("ab") as output:
        subprocess.run(
            [*launch, *(str(word) for word in argv)],
            check=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    wait_until(lambda: _noted(pid_file) is not None, 10, f"{name} to start")
    pid = _noted(pid_file)
    assert pid is not None
    return pid


def pid_of(state: Path, name: str) -> int | None:
    """The id of a running process of this instance, None when it is not running."""
    pid = _noted(_pid_file(state, name))
    return pid if pid is not None and _is_ours(pid, state) else None


def require(state: Path, names: Sequence[str]) -> None:
    """Raise ComponentDied, with the end of its log, when one of these is not running."""
    for name in names:
        if pid_of(state, name) is None:
            raise ComponentDied(f"{name} has ended.{last_lines(log_file(state, name))}")


def kill(state: Path, name: str, seconds: float = 20) -> None:
    """End a process at once; nothing to do when it is not running."""

    def running() -> set[int]:
        pid = pid_of(state, name)
        return set() if pid is None else {pid}

    kill_all(running, seconds, name)


def marked(state: Path) -> set[int]:
    """Ids of all running processes that belong to the instance with this state folder."""
    mine = os.getpid()
    pids = (int(entry) for entry in os.listdir("/proc") if entry.isdigit())
    return {pid for pid in pids if pid != mine and _is_ours(pid, state)}


def kill_all(find: Callable[[], set[int]], seconds: float, what: str) -> None:
    """Kill what `find` finds until it finds nothing more: processes may be starting others."""

    def none_left() -> bool:
        pids = find()
        for pid in pids:
            send(pid, signal.SIGKILL)
        return not pids

    wait_until(
        none_left, seconds, f"{what} to end", explain=lambda: f"still running: {sorted(find())}"
    )


def send(pid: int, number: int) -> None:
    """Send a signal; a process that has just ended needs none."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def log_file(state: Path, name: str) -> Path:
    return state / "logs" / f"{name}.log"


def last_lines(log: Path) -> str:
    """A sentence with the log's path and its last lines, to be put behind an error."""
    if not log.exists():
        return f" It wrote no log ({log})."
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join([f" The end of {log}:", *(f"    {line[:400]}" for line in lines)])


def _pid_file(state: Path, name: str) -> Path:
    return state / "pids" / name


def _noted(pid_file: Path) -> int | None:
    try:
        text = pid_file.read_text()
    except FileNotFoundError:
        return None
    return int(text) if text.endswith("\n") else None


def _is_ours(pid: int, state: Path) -> bool:
    """False for one that has ended and waits for its parent: its environment is empty."""
    return f"{MARK}={state}".encode() in _environment(pid).split(b"\0")


def _environment(pid: int) -> bytes:
    """The process's environment as the kernel shows it; empty when it has ended or is not ours."""
    folder = Path(f"/proc/{pid}")
    deadline = time.monotonic() + EXEC_SECONDS
    try:
        while True:
            environment = (folder / "environ").read_bytes()
            if environment or not _may_be_in_exec((folder / "stat").read_text()):
                return environment
            if time.monotonic() > deadline:  # it has none, as a program may
                return environment
            time.sleep(0.002)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _may_be_in_exec(stat: str) -> bool:
    """For a moment of becoming another program, a living process shows no environment."""
    # "PID (NAME) STATE …": the name may hold anything, so count from its end.
    state, *fields = stat.rpartition(")")[2].split()
    is_kernel_thread = bool(int(fields[5]) & PF_KTHREAD)
    return state not in "ZX" and not is_kernel_thread
