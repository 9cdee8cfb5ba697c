"""Waits for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(condition: Callable[[], object], what: str, timeout_seconds: float = 10.0) -> None:
    """Returns when `condition()` is true; fails the test with `what` at the deadline."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_seconds} s: {what}"
        time.sleep(0.005)
