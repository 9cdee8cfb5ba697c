"""A token bucket: bounds how fast `cluster` asks the API server and `events` tell it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class TokenBucket:
    """`per_second` requests on average, `burst` at once; thread-safe, first come first served."""

    def __init__(self, per_second: float, burst: int, monotonic: Callable[[], float]) -> None:
        if per_second <= 0 or burst < 1:
            raise ValueError(
                f"token bucket needs a rate > 0 and a burst ≥ 1: {per_second}, {burst}"
            )
        self._per_second, self._burst, self._monotonic = per_second, burst, monotonic
        self._lock = threading.Lock()
        self._tokens = float(burst)
        self._filled_at = monotonic()

    def reserve(self) -> float:
        """Take one token, on credit when there is none; returns the seconds to wait before use."""
        with self._lock:
            self._fill()
            self._tokens -= 1.0
            return max(0.0, -self._tokens / self._per_second)

    def try_take(self) -> bool:
        """Take one token if there is one now."""
        with self._lock:
            self._fill()
            if self._tokens < 1.0:
                return False
            self._tokens -= 1.0
            return True

    def _fill(self) -> None:
        now = self._monotonic()
        gained = (now - self._filled_at) * self._per_second
        self._tokens = min(float(self._burst), self._tokens + gained)
        self._filled_at = now
