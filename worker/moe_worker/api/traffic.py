"""The requests under way, and whether new ones are let in: what a drain waits for and ends.

Lives in the event loop only. `server` registers requests, `shutdown` drains them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from moe_worker.api.api_error import ApiError
from moe_worker.api.generation import Generation


class Traffic:
    def __init__(self) -> None:
        self.draining = False
        """Set once a drain began: no new request is let in."""
        self._num_requests = 0
        self._generations: set[Generation] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts one request from its first byte read to its last byte sent."""
        self._num_requests += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if not self._num_requests:
                self._idle.set()

    @contextmanager
    def generating(self, generation: Generation) -> Iterator[None]:
        """Keeps `generation` within reach of `end_all`, and cancels it when its reader leaves."""
        self._generations.add(generation)
        try:
            yield
        finally:
            self._generations.discard(generation)
            generation.close()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    async def idle(self) -> None:
        """Returns when no request is under way."""
        await self._idle.wait()

    def end_all(self, make_error: Callable[[], ApiError]) -> None:
        """Let every request under way end with an error."""
        for generation in self._generations:
            generation.end_early(make_error())
