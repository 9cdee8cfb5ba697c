"""Kubernetes events about MoEDeployments: deduplicated into series, bounded, rate-limited.

`reconcile` and its neighbours call `record`, which never blocks and never fails; one thread posts
through `cluster`. The same event again within `SERIES_SECONDS` raises the count of the first.
`Series` decides what is due (pure); `EventRecorder` is the thread around it.
"""

from __future__ import annotations

import datetime
import hashlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from moe_api import names
from moe_operator.context import Clock
from moe_operator.errors import OperatorError, TemporaryError
from moe_operator.resources import RESOURCES
from moe_operator.throttle import TokenBucket

if TYPE_CHECKING:
    from moe_operator.cluster import Cluster

SERIES_SECONDS = 360.0
"""An event that does not come again for this long is over; the next one is a new object."""
REPEAT_SECONDS = 30.0
"""A series is written at most this often."""
MAX_SERIES = 1024
MAX_NOTE_BYTES = 1024
"""The API server refuses longer notes."""

Severity = Literal["Normal", "Warning"]
logger = logging.getLogger(__name__)


class Event(NamedTuple):
    """What makes two events the same."""

    namespace: str
    kind: str
    name: str
    uid: str
    severity: Severity
    reason: str
    action: str
    note: str


@dataclass
class _Line:
    """One event and its repetitions."""

    event: Event
    first: datetime.datetime
    last: datetime.datetime
    last_at: float
    """Monotonic time of the newest occurrence."""
    count: int = 1
    posted_count: int = 0
    due: float = 0.0


class Series:
    """Events seen lately and which of them have to be written; not thread-safe."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Event, _Line] = OrderedDict()
        self.dropped = 0

    def add(self, event: Event, wall: datetime.datetime, now: float) -> None:
        line = self._lines.get(event)
        if line is not None and now - line.last_at <= SERIES_SECONDS:
            line.count, line.last, line.last_at = line.count + 1, wall, now
        else:
            self._lines[event] = _Line(event, first=wall, last=wall, last_at=now, due=now)
        self._lines.move_to_end(event)
        while len(self._lines) > MAX_SERIES:
            _, oldest = self._lines.popitem(last=False)
            self.dropped += oldest.count - oldest.posted_count

    def next_due(self, now: float) -> _Line | None:
        """The next line to write now; the caller must call `posted` or `put_off` on it."""
        pending = [ln for ln in self._lines.values() if ln.count > ln.posted_count]
        return min((ln for ln in pending if ln.due <= now), key=lambda ln: ln.due, default=None)

    def seconds_to_next(self, now: float) -> float | None:
        pending = [ln.due - now for ln in self._lines.values() if ln.count > ln.posted_count]
        return max(0.0, min(pending)) if pending else None

    def posted(self, line: _Line, count: int, now: float) -> None:
        line.posted_count = count
        line.due = now + REPEAT_SECONDS

    def put_off(self, line: _Line, now: float) -> None:
        line.due = now + REPEAT_SECONDS

    def forget(self, line: _Line) -> None:
        """The API server will never take it."""
        self.dropped += line.count - line.posted_count
        if self._lines.get(line.event) is line:
            del self._lines[line.event]


class EventRecorder:
    """`record` from any thread; `start` once, `stop` at the end."""

    def __init__(self, cluster: Cluster, clock: Clock, instance: str) -> None:
        self._cluster, self._clock, self._instance = cluster, clock, instance
        self._series = Series()
        self._bucket = TokenBucket(per_second=2.0, burst=25, monotonic=clock.monotonic)
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def record(
        self,
        about: Mapping[str, Any],
        severity: Severity,
        reason: str,
        note: str,
        action: str = "Reconcile",
    ) -> None:
        """Tell about an object in wire form; `reason` is one of the names in the contract."""
        metadata = about["metadata"]
        event = Event(
            metadata["namespace"], about["kind"], metadata["name"],
            metadata["uid"], severity, reason, action, _cut(note),
        )  # fmt: skip
        with self._changed:
            self._series.add(event, self._clock.wall(), self._clock.monotonic())
            self._changed.notify()

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """Write what is due now, then end."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(deadline_seconds)

    def _run(self) -> None:
        while (line := self._take()) is not None:
            self._post(line)

    def _take(self) -> _Line | None:
        with self._changed:
            while True:
                now = self._clock.monotonic()
                line = self._series.next_due(now)
                if line is not None and self._bucket.try_take():
                    return line
                if self._stopping:
                    return None
                wait = self._series.seconds_to_next(now)
                self._changed.wait(wait if line is None else 0.5)  # 0.5: until a token is there

    def _post(self, line: _Line) -> None:
        with self._changed:
            manifest, count = _manifest(line, self._instance), line.count
        try:
            self._cluster.apply(manifest)
        except OperatorError as error:
            self._failed(line, error)
        else:
            with self._changed:
                self._series.posted(line, count, self._clock.monotonic())

    def _failed(self, line: _Line, error: OperatorError) -> None:
        with self._changed:
            if isinstance(error, TemporaryError):
                self._series.put_off(line, self._clock.monotonic())
                return
            self._series.forget(line)
        event = line.event
        where = {"namespace": event.namespace}
        if event.kind == names.DEPLOYMENT_KIND:
            where["deployment"] = event.name
        logger.warning(
            "event %s about %s/%s dropped: %s", event.reason, event.namespace, event.name, error,
            extra=where,
        )  # fmt: skip


def _cut(note: str) -> str:
    """At most MAX_NOTE_BYTES of UTF-8, whole characters."""
    encoded = note.encode()
    if len(encoded) <= MAX_NOTE_BYTES:
        return note
    return encoded[: MAX_NOTE_BYTES - 3].decode(errors="ignore") + "…"


def _manifest(line: _Line, instance: str) -> dict[str, Any]:
    """events.k8s.io/v1 Event; its name is the same for every writing of one series."""
    event = line.event
    first = _micro_time(line.first)
    digest = hashlib.sha256("\0".join([*event, first]).encode()).hexdigest()[:16]
    manifest: dict[str, Any] = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"namespace": event.namespace, "name": f"{event.name}.{digest}"},
        "eventTime": first,
        "reportingController": f"{names.API_GROUP}/operator",
        "reportingInstance": instance[:128],
        "type": event.severity,
        "reason": event.reason,
        "action": event.action,
        "note": event.note,
        "regarding": {
            "apiVersion": RESOURCES[event.kind].api_version,
            "kind": event.kind,
            "namespace": event.namespace,
            "name": event.name,
            "uid": event.uid,
        },
    }
    if line.count > 1:
        manifest["series"] = {"count": line.count, "lastObservedTime": _micro_time(line.last)}
    return manifest


def _micro_time(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
