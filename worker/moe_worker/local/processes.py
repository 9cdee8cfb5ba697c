"""The ranks' processes: started, ended, and started anew under another incarnation.

Each has a session of its own, so that Ctrl-C reaches this process alone, and is told to end when
this process is gone. Neighbour: `group` decides when.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Launch:
    """How to start any rank."""

    config_file: Path
    token_file: Path
    log_dir: Path
    network: str
    threads: int


class RankProcess:
    """One rank's process; `restart` gives it another."""

    def __init__(self, member: int, launch: Launch) -> None:
        self.member, self._launch = member, launch
        self.address = f"{launch.network}.{2 + member}"
        self.log_file = launch.log_dir / f"rank-{member}.log"
        self.num_starts = 0
        self.start()

    def start(self) -> None:
        self.incarnation = uuid.uuid4().hex
        self.num_starts += 1
        command = [
            sys.executable, "-m", "moe_worker.main", "serve",
            "--config", str(self._launch.config_file),
            "--control-token-file", str(self._launch.token_file),
            "--host", self.address,
            "--address", self.address,
            "--namespace", "local",
            "--deployment", "local",
            "--member", str(self.member),
            "--incarnation", self.incarnation,
            "--threads", str(self._launch.threads),
        ]  # fmt: skip
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "OMP_NUM_THREADS": str(self._launch.threads),
            # A group that is formed anew is a fact; torch prints a stack for every lost socket.
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_end_with_parent(os.getpid()),
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it lives."""
        return self._process.poll()

    def terminate(self) -> None:
        """Drain; a second call ends its requests."""
        if self.exit_code is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.exit_code is None:
            self._process.kill()

    def wait(self, timeout_seconds: float) -> bool:
        """Whether it has ended by then."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self, num_lines: int = 5) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])


def _end_with_parent(parent: int) -> Callable[[], None]:
    """Run in the child before it becomes the rank: ask Linux for SIGTERM at the parent's death."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def ask() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return ask
