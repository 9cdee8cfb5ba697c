"""What can go wrong below a reconcile pass, by what the work queue should do about it.

    OperatorError
    ├── TemporaryError       try again with back-off; told at INFO, never as an error
    │   ├── NotLeader        this process may not write (any more)
    │   ├── Conflict         409: the object changed since it was read, or another UID has its name
    │   │   └── AlreadyExists
    │   └── Unavailable      401, 410, 429, 5xx or no answer; may carry `retry_after_seconds`
    ├── Missing              404 where an object was needed (its namespace, its CRD)
    └── Refused              400, 403, 413, 422: the API server will not take this as it is

Raised by `cluster`; `workqueue` decides by kind; `reconcile` may turn `Refused` into a condition.
"""

from __future__ import annotations

import json
from collections.abc import Mapping


class OperatorError(Exception):
    """Anything this operator raises on purpose."""


class TemporaryError(OperatorError):
    """Expected to pass by itself; the next attempt may succeed."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class NotLeader(TemporaryError):
    """A write was asked of a process that does not hold the lease."""


class Conflict(TemporaryError):
    """The API server answered 409: read again, compute again."""


class AlreadyExists(Conflict):
    """An object of that name is there already."""


class Unavailable(TemporaryError):
    """The API server is overloaded, restarting or not reachable."""


class Missing(OperatorError):
    """The API server answered 404 to something that should exist."""


class Refused(OperatorError):
    """The API server understood and refused; the same request will be refused again.

    `status` is the HTTP code, `reason` the machine-readable one (`Forbidden`, `Invalid`, …).
    """

    def __init__(self, message: str, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class SetupError(OperatorError):
    """The operator cannot start here; the message says what is missing and how to get it."""


def from_answer(
    what: str, status: int, headers: Mapping[str, str], content: bytes
) -> OperatorError:
    """The error for an answer of the API server that is not 2xx, with the server's own words."""
    try:
        told = json.loads(content)
        reason, message = str(told.get("reason", "")), str(told.get("message", ""))
    except (ValueError, AttributeError):
        reason, message = "", content[:500].decode(errors="replace")
    text = f"{what}: {status} {reason}: {message}"
    if status == 404:
        return Missing(text)
    if status == 409:
        return AlreadyExists(text) if reason == "AlreadyExists" else Conflict(text)
    # 401: a token is being renewed; 410: a list took longer than its snapshot was kept
    if status in (401, 410, 429) or status >= 500:
        retry_after = headers.get("Retry-After", "")
        return Unavailable(text, float(retry_after) if retry_after.isdigit() else None)
    return Refused(text, status, reason)
