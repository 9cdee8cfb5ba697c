"""Sends requests when they are due: the loop of both kinds of traffic.

As many senders as may be under way at once take the next request each, wait until it is due, send
it and see it end. A request that is due while all are busy is sent late, and still counts from when
it was due. Neighbours: `arrivals` says when, `client` sends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from moe_worker.bench.measurement import Measurement
from moe_worker.bench.prompts import Prompt
from moe_worker.bench.record import Record

Send = Callable[[Prompt, float], Awaitable[Record]]
"""(prompt, when it is due in seconds of `clock`) → what became of it; never fails."""


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]


async def drive(
    offsets_seconds: Iterator[float | None],
    prompts: Iterator[Prompt],
    send: Send,
    measurement: Measurement,
    most_at_once: int,
    stop_starting_seconds: float,
    clock: Clock,
) -> None:
    """Returns when every request that was started has ended.

    Args:
        offsets_seconds: arrivals after `measurement.began_seconds`, in order; None = at once.
        stop_starting_seconds: on `clock`; no request that has no time of its own starts then.
    """

    async def sender() -> None:
        for offset in offsets_seconds:
            now = clock.now()
            if offset is None:
                if now >= stop_starting_seconds:
                    return
                due = now
            else:
                due = measurement.began_seconds + offset
            prompt = next(prompts)
            if due > now:
                await clock.sleep(due - now)
            measurement.start()
            measurement.add(await send(prompt, due))

    async with asyncio.TaskGroup() as senders:
        for _ in range(most_at_once):
            senders.create_task(sender())
