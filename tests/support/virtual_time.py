"""An event loop whose clock jumps to the next thing that is due: hours pass in milliseconds, and
every run is the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    """For code that waits for time alone, not for sockets."""

    def __init__(self) -> None:
        self._virtual_seconds = 0.0
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self._virtual_seconds

    def jump(self, seconds: float) -> None:
        self._virtual_seconds += seconds


class _Selector(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits, and nothing is due: it would wait for ever"
        self._loop.jump(timeout)
        return super().select(0)


def run_virtual(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Like asyncio.run."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)
