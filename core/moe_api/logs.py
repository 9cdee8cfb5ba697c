"""Structured logs of operator and worker: one JSON object a line, with the keys that find an
incident.

Fields given through `extra={...}` (deployment, namespace, group, member, request_id, …) are
carried as they are.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any, TextIO

FIELDS = (
    "namespace", "deployment", "group", "member", "rank", "request_id",
    "generation", "epoch", "reason",
)  # fmt: skip


class JsonFormatter(logging.Formatter):
    """`context` is what is the same for every line of this process (deployment, group, member)."""

    def __init__(self, context: dict[str, Any] | None = None) -> None:
        super().__init__()
        self._context = context or {}

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._context,
        }
        for field in FIELDS:
            value = getattr(record, field, None)
            if value is not None:
                line[field] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(
    level: str, context: dict[str, Any] | None = None, stream: TextIO = sys.stderr
) -> None:
    """Send every logger of this process to `stream` as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(context))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
