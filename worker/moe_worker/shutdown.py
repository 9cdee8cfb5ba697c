"""How a worker ends: admission stops, requests finish, the group lets go, the process exits.

    first signal ─→ draining ─→ no request left ─→ left the group ─→ exit 0
                       │ drain time over: streams end with an error chunk
    second signal ─→ streams end with an error chunk ─→ exit 1

A drained worker goes on stepping with its group, which would otherwise miss its experts, until a
plan without it is in force. `POST /control/v1/drain` begins the same drain without the exit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from moe_worker.api.api_error import draining_deadline
from moe_worker.api.traffic import Traffic
from moe_worker.serving_engine import ServingEngine

logger = logging.getLogger(__name__)

ENDING_SECONDS = 5.0
"""For clients to take the last chunk after their requests were ended."""
HURRIED_ENDING_SECONDS = 1.0
POLL_SECONDS = 0.05


class Shutdown:
    """Lives in the event loop; signals call `on_signal`."""

    def __init__(self, engine: ServingEngine, traffic: Traffic, drain_seconds: float) -> None:
        self._engine = engine
        self._traffic = traffic
        self._drain_seconds = drain_seconds
        self._loop = asyncio.get_running_loop()
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()
        self._deadline_timer: asyncio.TimerHandle | None = None

    def on_signal(self) -> None:
        """The first signal drains, the second ends everything now."""
        if self._asked.is_set():
            logger.warning("second signal: ending all requests now")
            self._hurried.set()
            return
        logger.info("signal: draining for up to %.0f s", self._drain_seconds)
        self.begin_drain(self._drain_seconds)
        self._asked.set()

    def begin_drain(self, deadline_seconds: float) -> None:
        """Admit nothing new; end requests that run past the deadline. The newest call counts."""
        self._traffic.draining = True
        self._engine.drain(deadline_seconds)
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = self._loop.call_later(deadline_seconds, self._end_all)

    async def run(self) -> int:
        """Returns the exit code when nothing is left to do for anybody."""
        await self._asked.wait()
        drained = asyncio.ensure_future(self._drained(self._loop.time() + self._drain_seconds))
        hurried = asyncio.ensure_future(self._hurried.wait())
        try:
            await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
            if drained.done():
                drained.result()
                return 0
        finally:
            drained.cancel()
            hurried.cancel()
        self._end_all()
        await _before(self._loop.time() + HURRIED_ENDING_SECONDS, self._traffic.idle())
        return 1

    async def _drained(self, deadline: float) -> None:
        """Requests answered (or ended by the deadline's timer), then the group left, in time."""
        if not await _before(deadline + ENDING_SECONDS, self._traffic.idle()):
            logger.warning("%d clients did not take their answers", self._traffic.num_requests)
        if not await _before(deadline, self._left_group()):
            logger.warning("no plan without this worker came: leaving its group all the same")

    async def _left_group(self) -> None:
        while not self._engine.left_group:
            await asyncio.sleep(POLL_SECONDS)

    def _end_all(self) -> None:
        self._traffic.end_all(draining_deadline)


async def _before(deadline: float, done: Coroutine[Any, Any, None]) -> bool:
    """Wait for `done` until the deadline (the loop's time), then go on without it (False)."""
    try:
        async with asyncio.timeout_at(deadline):
            await done
    except TimeoutError:
        return False
    return True
