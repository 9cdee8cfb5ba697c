"""What an engine is told once, at its start. Nothing here changes while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from moe_api.names import CONTROL_PORT
from moe_api.worker import WorkerConfig


@dataclass(frozen=True)
class EngineSettings:
    config: WorkerConfig
    member: int
    """This worker's id in its group; plans name it."""
    incarnation: str
    """This very process; a plan that names another one is not for us."""
    token: str
    """Bearer token of the members' control APIs, where expert weights are pulled from."""
    control_port: int = CONTROL_PORT
    memory_bytes: int | None = None
    """What the process may use in all; None = the container's limit or the machine's memory."""
    tokens_per_round: int = 512
    """Tokens of one rank in one round of dispatch; must be the same on all members."""
    heartbeat_seconds: float = 0.25
    """An idle group agrees this often, to see that everybody is alive."""
    idle_poll_seconds: float = 0.004
    """An idle rank looks this often whether a member has begun a step: its added latency."""
    missing_grace_seconds: float = 5.0
    """Members that have not come to a rendezvous for so long are reported missing."""
    healthy_seconds: float = 60.0
    """Without progress for longer than this the engine calls itself unhealthy."""
