"""The requests under way, and whether new ones are let in: what a drain waits for and ends.

Lives in the event loop only. `completion_route` registers requests, `shutdown` drains them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from moe_worker.api.api_error import ApiError
from moe_worker.api.generation import Generation


class Traffic:
    def __init__(self) -> None:
        self.draining = False
        """Set once a drain began: no new request is let in."""
        self._num_requests = 0
        self._generations: dict[str, Sequence[Generation]] = {}
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
    def generating(self, request_id: str, generations: Sequence[Generation]) -> Iterator[None]:
        """Keeps the generations of a request within reach of `cancel` and `end_all`, and cancels
        them when their reader leaves."""
        self._generations[request_id] = generations
        try:
            yield
        finally:
            del self._generations[request_id]
            for generation in generations:
                generation.close()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    async def idle(self) -> None:
        """Returns when no request is under way."""
        await self._idle.wait()

    def cancel(self, request_id: str) -> bool:
        """End all answers to a request; False when nothing of it is under way."""
        generations = self._generations.get(request_id, ())
        return any([generation.cancel() for generation in generations])

    def end_all(self, make_error: Callable[[], ApiError]) -> None:
        """Let every request under way end with an error."""
        for generations in self._generations.values():
            for generation in generations:
                generation.end_early(make_error())
