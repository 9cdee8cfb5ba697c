"""One submitted sequence as the HTTP side sees it: events cross from engine thread to event loop.

Neighbours: `completion_route` makes one per choice, `pieces` reads it, `traffic` ends it early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from moe_worker.api.api_error import ApiError
from moe_worker.api.prepare import Choice
from moe_worker.engine.events import Event, Finished
from moe_worker.serving_engine import ServingEngine


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event, and when the engine made it (monotonic)."""

    event: Event
    seconds: float


class Generation:
    """Reads the events of one sequence and cancels it when its reader goes away.

    The queue holds every event that the engine may send (the prompt, one per token, the end) and
    one early end, so a reader that is slow or gone never blocks the engine and memory stays
    bounded.
    """

    def __init__(self, engine: ServingEngine, request_id: str, choice: Choice) -> None:
        self.request_id = request_id
        self._engine = engine
        self._choice = choice
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[Arrival | ApiError] = asyncio.Queue(choice.params.max_tokens + 3)
        self._finished = False
        self._ended_early = False

    def submit(self) -> None:
        """Raises what `ServingEngine.submit` raises."""
        choice = self._choice
        self._engine.submit(self.request_id, choice.prompt_ids, choice.params, self._from_engine)

    def end_early(self, error: ApiError) -> None:
        """Let the reader fail with `error` after what has arrived so far."""
        if not self._ended_early:
            self._ended_early = True
            self._queue.put_nowait(error)

    async def arrivals(self) -> AsyncGenerator[Arrival, None]:
        """All events in order, `Finished` last. Raises ApiError when ended early."""
        while not self._finished:
            item = await self._queue.get()
            if isinstance(item, ApiError):
                raise item
            self._finished = isinstance(item.event, Finished)
            yield item

    def cancel(self) -> bool:
        """Let the engine end it; its reader is told. False when the engine does not know it."""
        return self._engine.cancel(self.request_id)

    def close(self) -> None:
        """Cancel what is still running; nothing happens when all was read."""
        if not self._finished:
            self._finished = True
            self._engine.cancel(self.request_id)

    def _from_engine(self, event: Event) -> None:
        arrival = Arrival(event, time.monotonic())
        self._loop.call_soon_threadsafe(self._queue.put_nowait, arrival)
