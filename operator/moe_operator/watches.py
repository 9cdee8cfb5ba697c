"""How fresh each watch is, from what really crossed the wire: behind liveness and readiness.

A watch that dies without an error leaves a process that looks healthy and sees nothing. `main`
tells this module every answer of the API server to a watch and every event; `probes` asks it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from moe_operator.resources import RESOURCES


class Watch(NamedTuple):
    kind: str
    namespace: str | None
    """None = all namespaces, or a kind without."""


def expected_watches(kinds: Iterable[str], namespaces: tuple[str, ...]) -> list[Watch]:
    """One watch a kind, or one a kind and namespace when only some namespaces are served."""
    return [
        Watch(kind, namespace)
        for kind in kinds
        for namespace in (namespaces if namespaces and RESOURCES[kind].namespaced else (None,))
    ]


class Watches:
    """Thread-safe; `monotonic` in seconds."""

    def __init__(self, expected: Iterable[Watch], monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._by_path = {RESOURCES[w.kind].path(w.namespace): w for w in expected}
        began = monotonic()
        self._heard_at = dict.fromkeys(self._by_path.values(), began)
        self._opened: set[Watch] = set()

    def answered(self, path: str, status: int, watching: bool) -> str | None:
        """An answer to a LIST or WATCH on `path`; returns the kind when it was listed (again)."""
        watch = self._by_path.get(path)
        if watch is None or not 200 <= status < 300:
            return None
        if not watching:
            return watch.kind
        with self._lock:
            self._heard_at[watch] = self._monotonic()
            self._opened.add(watch)
        return None

    def ages(self) -> Mapping[str, float]:
        """Per kind, seconds since its most neglected watch was last opened."""
        ages: dict[str, float] = {}
        with self._lock:
            now = self._monotonic()
            for watch, heard_at in self._heard_at.items():
                ages[watch.kind] = max(ages.get(watch.kind, 0.0), now - heard_at)
        return ages

    def unopened(self) -> list[str]:
        """Kinds with a watch that was never opened yet."""
        with self._lock:
            return sorted({w.kind for w in self._heard_at if w not in self._opened})
