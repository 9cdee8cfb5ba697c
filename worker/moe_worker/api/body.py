"""Reads request bodies within bounds: each body, all bodies together, and the time one may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from moe_worker.api.api_error import ApiError, body_too_large, queue_full

READ_SECONDS = 30.0
MAX_BODIES_IN_MEMORY = 64
"""How many bodies of the largest allowed size may be held at the same time."""


class BodyReader:
    """One per listener; `max_bytes` bounds a single body."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._budget_bytes = max_bytes * MAX_BODIES_IN_MEMORY
        self._held_bytes = 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The whole body, which counts as held until the block ends.

        Raises:
            ApiError: 413 too large, 408 too slow, 429 when all bodies together are too large.
            ClientDisconnect: the client left.
        """
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        body = bytearray()
        try:
            await self._collect(request, body)
            yield bytes(body)
        finally:
            self._held_bytes -= len(body)

    async def _collect(self, request: Request, body: bytearray) -> None:
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in request.stream():
                    if len(body) + len(chunk) > self._max_bytes:
                        raise body_too_large(self._max_bytes)
                    if self._held_bytes + len(chunk) > self._budget_bytes:
                        raise queue_full(1)
                    self._held_bytes += len(chunk)
                    body += chunk
        except TimeoutError as error:
            message = f"The body did not arrive within {READ_SECONDS:.0f} seconds."
            raise ApiError(408, message, code="body_too_slow") from error
