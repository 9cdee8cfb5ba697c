"""From watch events to keys in the work queue: which MoEDeployments does this event concern?

`main` hands over every event, `resync` asks for everything. Nothing here reads or writes the
cluster; a wrong guess costs one idle pass, never a wrong action.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from moe_api import names
from moe_operator.context import Key
from moe_operator.nodes import project


class Queue(Protocol):
    def add(self, key: Key, *, delay_seconds: float = 0.0, urgent: bool = False) -> None: ...


class Intake:
    """Thread-safe. Remembers the names of deployments and the projections of nodes, no objects."""

    def __init__(self, queue: Queue, jitter: Callable[[], float]) -> None:
        self._queue, self._jitter = queue, jitter
        self._lock = threading.Lock()
        self._known: set[Key] = set()
        self._nodes: dict[str, Mapping[str, Any]] = {}

    def deployment(self, event_type: str | None, namespace: str, name: str) -> None:
        """An MoEDeployment appeared, changed, or (`DELETED`) went away."""
        key = Key(namespace, name)
        with self._lock:
            if event_type == "DELETED":
                self._known.discard(key)
            else:
                self._known.add(key)
        self._queue.add(key)

    def child(self, event_type: str | None, body: Mapping[str, Any]) -> None:
        """Something with our deployment label changed; a pod that ends goes first."""
        metadata = body["metadata"]
        deployment = (metadata.get("labels") or {}).get(names.LABEL_DEPLOYMENT)
        if not deployment:
            return
        urgent = body.get("kind") == "Pod" and (
            event_type == "DELETED"
            or "deletionTimestamp" in metadata
            or (body.get("status") or {}).get("phase") in ("Failed", "Succeeded")
        )
        self._queue.add(Key(metadata["namespace"], deployment), urgent=urgent)

    def node(self, event_type: str | None, body: Mapping[str, Any]) -> None:
        """A node changed; passes are asked for only when what we look at did."""
        name, seen = body["metadata"]["name"], project(body)
        with self._lock:
            before = self._nodes.get(name)
            if event_type == "DELETED":
                self._nodes.pop(name, None)
            else:
                self._nodes[name] = seen
            if before == seen and event_type != "DELETED":
                return
            keys = list(self._known)
        lost = event_type == "DELETED" or (not seen["ready"] and before is not None)
        for key in keys:
            self._queue.add(key, urgent=lost)

    def resync(self, listed: Iterable[tuple[str, str]], spread_seconds: float) -> None:
        """Every object there is, and once more every one that is gone, spread over some time."""
        there = {Key(namespace, name) for namespace, name in listed}
        with self._lock:
            keys = there | self._known
            self._known = there
        for key in keys:
            self._queue.add(key, delay_seconds=spread_seconds * self._jitter())

    def relisted(self) -> None:
        """A watch was interrupted and its kind listed anew: deletions meanwhile left no event."""
        with self._lock:
            keys = list(self._known)
        for key in keys:
            self._queue.add(key)
