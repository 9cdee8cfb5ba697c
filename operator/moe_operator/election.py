"""Who leads, decided from what this process itself saw: no remote clock is ever believed.

`lease` reads and writes the record in the API; `Election` says what to write and whether this
process may act. A standby measures, on its own clock, how long the record has not *changed*; the
times inside the record are for people. All times here are monotonic seconds, given by the caller.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from moe_operator.settings import LeaseSettings


@dataclass(frozen=True)
class Record:
    """spec of a coordination.k8s.io Lease; `version` makes a write conditional on this reading."""

    holder: str
    transitions: int
    duration_seconds: int
    acquire_time: str
    renew_time: str
    version: str = ""

    @classmethod
    def from_wire(cls, lease: Mapping[str, Any]) -> Self:
        spec = lease.get("spec") or {}
        return cls(
            holder=spec.get("holderIdentity") or "",
            transitions=int(spec.get("leaseTransitions") or 0),
            duration_seconds=int(spec.get("leaseDurationSeconds") or 0),
            acquire_time=spec.get("acquireTime") or "",
            renew_time=spec.get("renewTime") or "",
            version=lease["metadata"]["resourceVersion"],
        )

    def to_wire(self, namespace: str, name: str) -> dict[str, Any]:
        metadata = {"namespace": namespace, "name": name}
        if self.version:
            metadata["resourceVersion"] = self.version
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": self.holder,
                "leaseTransitions": self.transitions,
                "leaseDurationSeconds": self.duration_seconds,
                "acquireTime": self.acquire_time,
                "renewTime": self.renew_time,
            },
        }

    @property
    def heartbeat(self) -> tuple[str, int, str]:
        """Changes whenever the holder shows that it lives."""
        return self.holder, self.transitions, self.renew_time


class Election:
    """State of one candidate; not thread-safe.

    standby: `observe` what is stored, then write `claim` if there is one and tell `won`.
    leader: write `renewal`, tell `renewed`; `holds` is False once the last renewal is too old.
    """

    def __init__(self, identity: str, settings: LeaseSettings) -> None:
        self.identity, self._settings = identity, settings
        self._seen: Record | None = None
        self._seen_changing_at = 0.0
        self._mine: Record | None = None
        self._renewed_at = 0.0

    def observe(self, record: Record | None, now: float) -> None:
        """What the API holds now; one that vanished is believed until it would have expired."""
        if record is None:
            if self._seen is not None and self._expired(self._seen, now):
                self._seen = None
        elif self._seen is None or record.heartbeat != self._seen.heartbeat:
            self._seen, self._seen_changing_at = record, now
        else:
            self._seen = record

    def claim(self, stored: Record | None, now: float, wall: datetime.datetime) -> Record | None:
        """The record that takes leadership, or None while somebody else may hold it."""
        if self._seen is not None and self._seen.holder and not self._expired(self._seen, now):
            return None
        moment = micro_time(wall)
        return Record(
            holder=self.identity,
            transitions=stored.transitions + 1 if stored is not None else 0,
            duration_seconds=round(self._settings.duration_seconds),
            acquire_time=moment,
            renew_time=moment,
            version=stored.version if stored is not None else "",
        )

    def renewal(self, wall: datetime.datetime) -> Record:
        """The leader's record with a new heartbeat."""
        assert self._mine is not None, "only a leader renews"
        return replace(self._mine, renew_time=micro_time(wall))

    def release(self) -> Record:
        """The record that lets a standby take over at once."""
        assert self._mine is not None, "only a leader releases"
        return replace(self._mine, holder="", duration_seconds=1)

    def won(self, written: Record, sent_at: float) -> None:
        """`written` is stored; `sent_at` is when the request began, not when it was answered."""
        self._mine, self._renewed_at = written, sent_at

    renewed = won

    def adopt(self, stored: Record | None) -> bool:
        """After a refused renewal: True when the stored record is still this leader's."""
        if stored is None or self._mine is None or stored.holder != self.identity:
            return False
        self._mine = replace(self._mine, version=stored.version)
        return True

    def holds(self, now: float) -> bool:
        """Whether this process may act as the leader at `now`."""
        return (
            self._mine is not None
            and now < self._renewed_at + self._settings.renew_deadline_seconds
        )

    def _expired(self, record: Record, now: float) -> bool:
        return now >= self._seen_changing_at + record.duration_seconds


def micro_time(wall: datetime.datetime) -> str:
    """MicroTime of the Kubernetes API."""
    return wall.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
