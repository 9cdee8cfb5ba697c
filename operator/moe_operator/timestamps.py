"""Times as Kubernetes writes them, for people; nothing is decided by them."""

from __future__ import annotations

import datetime

from moe_operator.context import Clock


def timestamp(clock: Clock) -> str:
    """Now, RFC 3339 in UTC, whole seconds."""
    return clock.wall().astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
