"""Starts worker processes by their command line, each on an own address, and reads their logs."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from moe_api import names
from tests.support.until import until

ROOT = Path(__file__).parents[2]
SOURCE_ROOTS = ("core", "operator", "worker", "kernels", ".")


@dataclass
class WorkerCommand:
    process: subprocess.Popen[bytes]
    host: str
    log_path: Path

    @property
    def public_url(self) -> str:
        return f"http://{self.host}:{names.HTTP_PORT}"

    @property
    def control_url(self) -> str:
        return f"http://{self.host}:{names.CONTROL_PORT}"

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.public_url, timeout=30)

    def control(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=self.control_url, headers=headers, timeout=30)

    def answers(self, path: str, status: int = 200) -> bool:
        """Does the public listener answer so now? A dead process fails the test."""
        assert self.process.poll() is None, f"exit {self.process.returncode}: {self.log()}"
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.public_url + path, timeout=5).status_code == status
        return False

    def log(self) -> str:
        return self.log_path.read_text()

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log().splitlines()]


@contextmanager
def started(module_and_flags: list[str], host: str, log_path: Path) -> Iterator[WorkerCommand]:
    """A process that has just been started; killed at the block's end if still there."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in SOURCE_ROOTS),
        "OMP_NUM_THREADS": "1",
    }
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *module_and_flags], cwd=ROOT, env=environment, stderr=log
        )
    try:
        yield WorkerCommand(process, host, log_path)
    finally:
        process.kill()
        process.wait(30)


@contextmanager
def worker_command(
    module_and_flags: list[str], host: str, log_path: Path
) -> Iterator[WorkerCommand]:
    """A process that answers /healthz when the block begins."""
    with started(module_and_flags, host, log_path) as worker:
        until(lambda: worker.answers("/healthz"), "the worker listens", 120)
        yield worker
