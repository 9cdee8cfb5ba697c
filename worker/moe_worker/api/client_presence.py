"""Stops work for a client as soon as the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """Result of `work`, None when the client left first; the work was cancelled then.

    The request's body must have been read: what `receive` still has to say is only that the client
    left.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait({working, leaving})
    return None if working.cancelled() else working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
