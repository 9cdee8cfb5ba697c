"""Makes a checkout ready to run: virtual environment and, unless told not to, the cluster's
programs.

The parts are set up side by side. Each is skipped when it is already as the checkout wants it, so
this runs before every `make` target that needs it. Standard library only: nothing is installed yet.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "prepared"
LOGS = ROOT / ".state" / "prepare"
INSTALL_SECONDS = 1800
REPORT_SECONDS = 15


class Failed(Exception):
    """A part that could not be set up; the message says which log to read."""


class Part(threading.Thread):
    """One thing to set up, in its own thread, with its own log file."""

    def __init__(self, title: str, work: Callable[[Part], None]) -> None:
        super().__init__(name=title, daemon=True)
        self.title = title
        self.log = LOGS / f"{title.replace(' ', '-')}.log"
        self.error: str | None = None
        self.seconds = 0.0
        self._work = work
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        started = time.monotonic()
        try:
            self._work(self)
        except (Failed, OSError) as error:
            self.error = str(error)
        self.seconds = time.monotonic() - started

    def call(self, *argv: str | Path) -> None:
        """Run a program with its output in this part's log; raises Failed with the log's last
        lines."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = self._process.wait(INSTALL_SECONDS)
            except subprocess.TimeoutExpired as error:
                self.stop()
                raise Failed(
                    f"{self.title}: ran past {INSTALL_SECONDS} s, see {self.log}"
                ) from error
        if code != 0:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise Failed(f"{self.title}: `{argv[0]} …` returned {code}, see {self.log}\n{tail}")

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)


def main() -> int:
    options = _parser().parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two `make` at once: the second finds all done
        parts = _needed(options.cluster)
        return _run_side_by_side(parts) if parts else 0


def _needed(cluster: bool) -> list[Part]:
    parts = []
    if not STAMP.exists() or STAMP.read_text() != wanted_environment():
        parts.append(Part("python environment", _make_environment))
    if cluster and not _cluster_is_ready():
        parts.append(Part("cluster programs", _make_cluster_programs))
    return parts


def wanted_environment() -> str:
    """Digest of everything that the virtual environment is made from."""
    digest = hashlib.sha256(f"{sys.version}\0{sys.base_prefix}\0{ROOT}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def _make_environment(part: Part) -> None:
    STAMP.unlink(missing_ok=True)
    python = VENV / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", ""], check=False).returncode != 0:
        shutil.rmtree(VENV, ignore_errors=True)
        part.call(sys.executable, "-m", "venv", VENV)
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    part.call(*pip, "--constraint", "constraints.txt", "hatchling", "editables")
    part.call(
        *pip, "--constraint", "constraints.txt", "--no-build-isolation",
        "--editable", ".[operator,worker,dev]",
    )  # fmt: skip
    STAMP.write_text(wanted_environment())


def _cluster_is_ready() -> bool:
    question = "from devcluster import build, debian; import sys; " + (
        "sys.exit(not build.is_built() or bool(debian.missing_packages(True)))"
    )
    return subprocess.run([sys.executable, "-c", question], cwd=ROOT, check=False).returncode == 0


def _make_cluster_programs(part: Part) -> None:
    part.call(sys.executable, "-m", "devcluster", "build")
    if os.geteuid() == 0:  # without root there are no nodes, and their tests are skipped
        install = "from devcluster import debian, progress; " + (
            "debian.require_programs(True, progress.printer())"
        )
        part.call(sys.executable, "-c", install)


def _run_side_by_side(parts: list[Part]) -> int:
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}s] {message}", flush=True)

    for part in parts:
        say(f"setting up: {part.title} (log: {part.log.relative_to(ROOT)})")
        part.start()
    try:
        running, reported = list(parts), time.monotonic()
        while running:
            running[0].join(0.5)
            for part in [p for p in running if not p.is_alive()]:
                running.remove(part)
                outcome = "FAILED" if part.error else "ready"
                say(f"{part.title}: {outcome} after {part.seconds:.0f} s")
            if running and time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                say("still at: " + ", ".join(part.title for part in running))
    except KeyboardInterrupt:
        for part in parts:
            part.stop()
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    for part in parts:
        if part.error:
            print(part.error, file=sys.stderr)
    return 1 if any(part.error for part in parts) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/prepare.py",
        description="Set up this checkout: .venv and the programs of the test cluster.",
    )
    parser.add_argument(
        "--no-cluster", dest="cluster", action="store_false",
        help="only the Python environment (no root, no Debian packages, no Go)",
    )  # fmt: skip
    return parser


if __name__ == "__main__":
    sys.exit(main())
