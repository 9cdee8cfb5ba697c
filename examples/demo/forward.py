"""`kubectl port-forward` to one pod's public and control port, started again whenever it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time

from examples.demo.kube import DemoError, Kube
from moe_api.names import CONTROL_PORT, HTTP_PORT

PORTS = {HTTP_PORT: "http", CONTROL_PORT: "control"}
RECONNECT_SECONDS = 0.3


class Forward:
    """Local addresses of a pod or service; `close` ends it. A dead pod's forward never connects
    again."""

    def __init__(self, kube: Kube, target: str, ports: tuple[int, ...] = (HTTP_PORT,)) -> None:
        self.target = target
        self._kube, self._ports = kube, ports
        self._local: dict[int, int] = {}
        self._open = threading.Event()
        self._closed = threading.Event()
        self._process: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._keep_open, name=target, daemon=True)
        self._thread.start()

    def url(self, port: int = HTTP_PORT, timeout_seconds: float = 20) -> str:
        """Base address of a port; waits for the connection."""
        if not self._open.wait(timeout_seconds):
            raise DemoError(f"no port-forward to {self.target} within {timeout_seconds:.0f} s")
        return f"http://127.0.0.1:{self._local[port]}"

    def close(self) -> None:
        self._closed.set()
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._thread.join(10)

    def _keep_open(self) -> None:
        while not self._closed.is_set():
            wanted = [f"{self._local.get(port, '')}:{port}" for port in self._ports]
            with self._kube.spawn("port-forward", self.target, *wanted) as process:
                self._process = process
                if self._closed.is_set():  # closed between the check and the start
                    os.killpg(process.pid, signal.SIGTERM)
                assert process.stdout is not None
                for line in process.stdout:
                    self._read(line)
            self._open.clear()
            self._closed.wait(RECONNECT_SECONDS)

    def _read(self, line: str) -> None:
        found = re.match(r"Forwarding from 127\.0\.0\.1:(\d+) -> (\d+)", line)
        if found:
            self._local[int(found[2])] = int(found[1])
            if len(self._local) == len(self._ports):
                self._open.set()


def wait_until_open(forwards: list[Forward], timeout_seconds: float = 30) -> None:
    deadline = time.monotonic() + timeout_seconds
    for forward in forwards:
        forward.url(timeout_seconds=max(0.1, deadline - time.monotonic()))
