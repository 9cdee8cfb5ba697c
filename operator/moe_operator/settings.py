"""What the operator process is told at its door: one frozen `Settings`, composed of small ones.

`main` builds it once; nobody below reads the environment or the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moe_operator.workqueue import Backoff


@dataclass(frozen=True)
class LeaseSettings:
    """Leadership; the relations of client-go hold: duration > renew deadline > retry period."""

    namespace: str = "moe-operator"
    name: str = "moe-operator"
    duration_seconds: float = 15.0
    """A standby waits this long after the last change it saw of the record."""
    renew_deadline_seconds: float = 10.0
    """The leader stops writing when its last successful renewal began longer ago than this."""
    retry_seconds: float = 2.0

    def __post_init__(self) -> None:
        if not self.duration_seconds > self.renew_deadline_seconds > self.retry_seconds > 0:
            raise ValueError(
                f"lease duration {self.duration_seconds} s must exceed the renew deadline "
                f"{self.renew_deadline_seconds} s, and that the retry period {self.retry_seconds} s"
            )


@dataclass(frozen=True)
class ClientSettings:
    """Requests to the API server."""

    requests_per_second: float = 50.0
    burst: int = 100
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    list_page: int = 500


@dataclass(frozen=True)
class WatchSettings:
    """Streams of events; a silent one is a fault, because bookmarks come every minute."""

    server_timeout_seconds: int = 120
    """The API server ends every watch after this and it is opened again; no fraction is taken."""
    inactivity_seconds: float = 70.0
    """A watch without event or bookmark for this long is opened again."""
    stale_seconds: float = 300.0
    """Liveness fails when a watch could not be opened for this long."""


@dataclass(frozen=True)
class WorkerCallSettings:
    """Requests to workers' control listeners."""

    connect_timeout_seconds: float = 1.0
    deadline_seconds: float = 3.0
    """For a whole call, from connecting to the last byte of the answer."""
    max_parallel: int = 32
    max_answer_bytes: int = 16 * 1024 * 1024


@dataclass(frozen=True)
class WorkerDefaults:
    """What a worker pod gets where the MoEDeployment is silent (the chart fills these in)."""

    image: str | None = None
    image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """Overlay under the user's own `spec.worker.podTemplate` (tolerations, runtime class, …)."""


@dataclass(frozen=True)
class Settings:
    kubeconfig: str | None = None
    """None = the pod's service account, else the KUBECONFIG of the environment."""
    namespaces: tuple[str, ...] = ()
    """Empty = the whole cluster."""
    worker: WorkerDefaults = WorkerDefaults()
    lease: LeaseSettings = LeaseSettings()
    client: ClientSettings = ClientSettings()
    watches: WatchSettings = WatchSettings()
    worker_calls: WorkerCallSettings = WorkerCallSettings()
    backoff: Backoff = field(default_factory=Backoff)
    reconcile_threads: int = 4
    resync_seconds: float = 300.0
    """Every object is reconciled at least this often (jittered by ±20 %)."""
    probe_port: int = 8080
    stuck_pass_seconds: float = 300.0
    """Liveness fails when one pass runs longer than this."""
    shutdown_seconds: float = 10.0
    """For passes in progress when the process is asked to end."""
    setup_wait_seconds: float = 15.0
    """At start, for the API server to answer and to serve our kinds."""
