"""What the scenes share: the deployment on the cluster, its pods, and the screen."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from examples.demo.forward import Forward, wait_until_open
from examples.demo.kube import DemoError, Kube
from examples.demo.load import Workers
from examples.demo.report import Measured
from moe_api.names import (
    CONTROL_PORT,
    CONTROL_TOKEN_FILE,
    HTTP_PORT,
    LABEL_DEPLOYMENT,
    control_secret_name,
    group_name,
)

DEPLOYMENT = "tiny-moe"


@dataclass
class Stage:
    kube: Kube
    console: Console
    measured: Measured = field(default_factory=Measured)
    started: float = field(default_factory=time.monotonic)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """Print a line when a step begins and how long it took when it ends."""
        began = time.monotonic()
        self.say(f"{title} …")
        yield
        took = time.monotonic() - began
        self.measured.steps[title] = round(took, 1)
        self.say(f"{title}: done in {took:.1f} s")

    def say(self, message: str) -> None:
        elapsed = time.monotonic() - self.started
        self.console.print(f"[dim]\\[{elapsed:6.1f}s][/dim] {message}", highlight=False)

    def deployment(self) -> dict[str, Any]:
        found = self.kube.get("moed", DEPLOYMENT)
        if found is None:
            raise DemoError(f"MoEDeployment {DEPLOYMENT} is gone")
        return found

    def placement(self) -> dict[str, Any]:
        found = self.kube.get("xp", group_name(DEPLOYMENT, 0))
        if found is None:
            raise DemoError(f"ExpertPlacement {group_name(DEPLOYMENT, 0)} does not exist")
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """A condition of the deployment; empty while it has none."""
        conditions = self.deployment().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def is_ready(self) -> bool:
        return self.condition("Ready").get("status") == "True"

    def why_not_ready(self) -> str:
        ready = self.condition("Ready")
        return f"Ready: {ready.get('reason', 'no status yet')}: {ready.get('message', '')}"

    def pods(self) -> list[dict[str, Any]]:
        return self.kube.find("pods", f"{LABEL_DEPLOYMENT}={DEPLOYMENT}")

    def forwards(self) -> list[Forward]:
        """A port-forward to every member of the plan in force, in the order of ranks."""
        members = self.placement()["spec"]["members"]
        ports = (HTTP_PORT, CONTROL_PORT)
        forwards = [Forward(self.kube, f"pod/{member['pod']}", ports) for member in members]
        wait_until_open(forwards)
        return forwards

    def workers(self, forwards: list[Forward]) -> Workers:
        name = control_secret_name(DEPLOYMENT, self.deployment()["metadata"]["uid"])
        secret = self.kube.get("secret", name)
        if secret is None:
            raise DemoError(f"Secret {name} does not exist")
        token = base64.b64decode(secret["data"][CONTROL_TOKEN_FILE]).decode()
        return Workers(forwards, token)
