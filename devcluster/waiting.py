"""Waiting with a condition, a deadline and somebody who notices that waiting is in vain."""

from __future__ import annotations

import time
from collections.abc import Callable

from devcluster.errors import DeadlineExceeded


def wait_until(
    condition: Callable[[], bool],
    seconds: float,
    what: str,
    *,
    check: Callable[[], None] = lambda: None,
    explain: Callable[[], str] = lambda: "",
    interval_seconds: float = 0.05,
) -> None:
    """Return as soon as `condition()` is true.

    `check` runs between two looks and raises when waiting has become pointless (a process died).
    Raises DeadlineExceeded with `explain()` added after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"waited {seconds:g} s for {what}{_suffix(explain())}")
        time.sleep(interval_seconds)


def _suffix(text: str) -> str:
    return f": {text}" if text else ""
