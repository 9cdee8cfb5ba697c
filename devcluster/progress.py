"""A line for each step, with the seconds since the start."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]


def printer() -> Say:
    """Return a function that prints its message behind the seconds since this call."""
    started = time.monotonic()

    def say(message: str) -> None:
        print(f"[{time.monotonic() - started:6.1f}s] {message}", file=sys.stderr, flush=True)

    return say
