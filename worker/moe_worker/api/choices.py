"""Several texts that are generated at the same time, read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Ended:
    error: Exception | None


async def merged(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all sources with their source's index, in the order in which they come.

    No source runs ahead of the reader by more than an item. The first error of one ends them all.
    """
    queue: asyncio.Queue[tuple[int, Item] | _Ended] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_pump(i, source, queue)) for i, source in enumerate(sources)]
    try:
        num_open = len(tasks)
        while num_open:
            got = await queue.get()
            if isinstance(got, _Ended):
                if got.error is not None:
                    raise got.error
                num_open -= 1
            else:
                yield got
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _pump(
    index: int,
    source: AsyncGenerator[Item, None],
    queue: asyncio.Queue[tuple[int, Item] | _Ended],
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(source) as items:
            async for item in items:
                await queue.put((index, item))
    except Exception as caught:
        error = caught
    await queue.put(_Ended(error))
