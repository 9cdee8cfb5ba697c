"""The cluster as the demo sees it: kubectl and helm of the user's PATH or of our own test
cluster."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_SECONDS = 0.3


class DemoError(Exception):
    """Something the demo needs did not happen; the message says what and where to look."""


class Kube:
    """Runs `kubectl` and `helm` against one cluster and namespace."""

    def __init__(self, kubectl: str, helm: str, kubeconfig: Path | None, namespace: str) -> None:
        self.namespace = namespace
        self._kubectl, self._helm = kubectl, helm
        self._environment = dict(os.environ)
        if kubeconfig is not None:
            self._environment["KUBECONFIG"] = str(kubeconfig)

    def kubectl(self, *arguments: str, timeout_seconds: float = 60) -> str:
        return self._run([self._kubectl, "-n", self.namespace, *arguments], timeout_seconds)

    def apply(self, manifest: str) -> None:
        """Server-side apply of a manifest given as text."""
        self._run([self._kubectl, "apply", "--server-side", "-f", "-"], 60, manifest)

    def helm(self, *arguments: str, timeout_seconds: float = 180) -> str:
        return self._run([self._helm, *arguments], timeout_seconds)

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        """A kubectl that keeps running (port-forward); its caller ends it."""
        return subprocess.Popen(
            [self._kubectl, "-n", self.namespace, *arguments],
            env=self._environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """An object, or None when it does not exist."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def find(self, kind: str, selector: str) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(
            self.kubectl("get", kind, "-l", selector, "-o", "json")
        )["items"]
        return items

    def wait(
        self,
        what: str,
        done: Callable[[], bool],
        timeout_seconds: float,
        tell: Callable[[], str] = lambda: "",
    ) -> float:
        """Poll until `done`; returns the seconds it took, raises DemoError with what `tell`
        says."""
        started = time.monotonic()
        while not done():
            if time.monotonic() - started > timeout_seconds:
                raise DemoError(f"waited {timeout_seconds:.0f} s for {what}. {tell()}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started

    def _run(self, argv: list[str], timeout_seconds: float, text: str = "") -> str:
        try:
            done = subprocess.run(
                argv, env=self._environment, text=True, capture_output=True,
                input=text, timeout=timeout_seconds,
            )  # fmt: skip
        except FileNotFoundError as error:
            raise DemoError(f"{argv[0]} is not on PATH: install it, or use CLUSTER=own") from error
        except subprocess.TimeoutExpired as error:
            raise DemoError(f"`{' '.join(argv)}` ran past {timeout_seconds:.0f} s") from error
        if done.returncode != 0:
            raise DemoError(f"`{' '.join(argv)}` failed: {done.stderr.strip() or done.stdout}")
        return done.stdout
