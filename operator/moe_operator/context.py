"""What every reconcile pass is given: the world's doors, time, chance and a losable memory.

`main` builds one `Context` when this process becomes leader; `reconcile` and all below it take from
it, never from module globals. A process that loses the lease exits: `leader_epoch` is a constant.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    from moe_operator.cluster import Cluster
    from moe_operator.events import EventRecorder
    from moe_operator.metrics import OperatorMetrics
    from moe_operator.settings import Settings
    from moe_operator.workers import WorkerClient

T = TypeVar("T")


class Key(NamedTuple):
    """An MoEDeployment, by name: it may be gone, or another one by now."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class Clock:
    monotonic: Callable[[], float]
    """Seconds that never go back and go on while the machine sleeps: for deadlines."""
    wall: Callable[[], datetime.datetime]
    """Aware UTC time: only to be shown or stored for people, never subtracted."""


class Memory:
    """Per-key notes between passes (load windows, back-offs, …); losing them costs time, not truth.

    Passes over one key never overlap, so a note needs no lock of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._notes: dict[Hashable, dict[str, Any]] = {}

    def of(self, key: Hashable, name: str, make: Callable[[], T]) -> T:
        """The note `name` of `key`, made when there is none."""
        with self._lock:
            notes = self._notes.setdefault(key, {})
            if name not in notes:
                notes[name] = make()
            note: T = notes[name]
            return note

    def forget(self, key: Hashable) -> None:
        """The object is gone: drop all its notes."""
        with self._lock:
            self._notes.pop(key, None)


@dataclass(frozen=True)
class Context:
    cluster: Cluster
    workers: WorkerClient
    events: EventRecorder
    metrics: OperatorMetrics
    settings: Settings
    clock: Clock
    random_suffix: Callable[[], str]
    """Five characters [a-z0-9] that make a pod's name unique among incarnations."""
    leader_epoch: int
    memory: Memory = field(default_factory=Memory)
