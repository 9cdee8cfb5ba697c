"""One operator process under test: started, watched through its log and probes, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from devcluster.build import CHECKOUT
from devcluster.waiting import wait_until

START_SECONDS = 60
SOURCES = ("core", "operator", ".")


class OperatorProcess:
    """A context manager; `command` is what follows `python -m`."""

    def __init__(self, kubeconfig: Path, log: Path, *command: str, probe_port: int = 0) -> None:
        self.log, self.probe_port = log, probe_port
        environment = {
            **os.environ,
            "KUBECONFIG": str(kubeconfig),
            "PYTHONPATH": os.pathsep.join(str(CHECKOUT / source) for source in SOURCES),
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=CHECKOUT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
            )

    def __enter__(self) -> OperatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """As the kernel would: no goodbye."""
        self.process.kill()
        self.process.wait()

    def terminate(self, deadline_seconds: float = 30) -> int:
        """As the kubelet would; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(deadline_seconds)

    def lines(self) -> list[dict[str, Any]]:
        """The structured log so far."""
        text = self.log.read_text(errors="replace")
        return [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def said(self, words: str) -> bool:
        return any(words in line["message"] for line in self.lines())

    def errors(self) -> list[str]:
        return [line["message"] for line in self.lines() if line["level"] == "error"]

    def probe(self, path: str) -> tuple[int, str]:
        """Status and text; status 0 while nobody listens."""
        try:
            url = f"http://127.0.0.1:{self.probe_port}{path}"
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def wait_until_ready(self) -> None:
        self._wait(lambda: self.probe("/readyz")[0] == 200, "a ready operator")

    def wait_until_leading(self) -> None:
        self._wait(lambda: self.said("reconciling with leader epoch"), "a leading operator")

    def _wait(self, condition: Any, what: str) -> None:
        def holds() -> bool:
            ended = self.process.poll()
            assert ended is None, f"exit code {ended}:\n{self.log.read_text()[-3000:]}"
            return bool(condition())

        wait_until(holds, START_SECONDS, what)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
