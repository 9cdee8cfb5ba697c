"""A pool of real processes for tests of one module: ranks that run functions sent to them.

Processes are forked from a server that has imported torch once, so a fresh one costs
milliseconds. Functions are sent by name: they live in `tests.support` or in the product. Each pool
has a loopback network of its own (127.a.b.0/24), so constant ports never clash.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from moe_kernels import implementation

PRELOADED = [
    "torch",
    "torch.distributed",
    "httpx",
    "moe_worker.expert.layer",
    "moe_worker.membership",
]


class RankError(AssertionError):
    """A function failed in a rank; carries that rank's traceback."""


def free_network() -> str:
    """First three numbers of a loopback network on which nobody serves."""
    while True:
        network = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}"
        with socket.socket() as probe:
            try:
                probe.bind((f"{network}.2", 8001))
            except OSError:
                continue
        return network


class Rank:
    """One process that runs one function at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        context = _context()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def is_usable(self) -> bool:
        """Whether the process lives (a stopped one is set going again)."""
        if self.process.is_alive():
            self.signal(signal.SIGCONT)
        return self.process.is_alive()

    def post(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._pipe.send((function, args, kwargs))

    def answer(self, timeout_seconds: float = 60.0) -> tuple[bool, Any]:
        """(True, result) or (False, traceback) of the function posted last."""
        if not self._pipe.poll(timeout_seconds):
            return False, f"no result in {timeout_seconds} s"
        try:
            answer: tuple[bool, Any] = self._pipe.recv()
        except EOFError:
            return False, f"the process ended, exit code {self.process.exitcode}"
        return answer

    def unpack(self, answer: tuple[bool, Any]) -> Any:
        ok, value = answer
        if not ok:
            raise RankError(f"rank at {self.address}: {value}")
        return value

    def result(self, timeout_seconds: float = 60.0) -> Any:
        return self.unpack(self.answer(timeout_seconds))

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.post(function, *args, **kwargs)
        return self.result()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join(10)
        self._pipe.close()


class Pool:
    """Ranks 0 to N−1 at addresses .2, .3, … of one loopback network."""

    def __init__(self, size: int) -> None:
        self.network = free_network()
        self.ranks = [Rank(self.address(index)) for index in range(size)]

    def address(self, index: int) -> str:
        return f"{self.network}.{2 + index}"

    def each(
        self, function: Callable[..., Any], per_rank: Sequence[tuple[Any, ...]], **kwargs: Any
    ) -> list[Any]:
        """Run side by side on as many ranks as there are argument tuples; results in rank order."""
        ranks = self.ranks[: len(per_rank)]
        for rank, args in zip(ranks, per_rank, strict=True):
            rank.post(function, *args, **kwargs)
        # All answers are taken before any failure is raised, so that none is left in a pipe.
        answers = [rank.answer() for rank in ranks]
        return [rank.unpack(answer) for rank, answer in zip(ranks, answers, strict=True)]

    def replace(self, index: int) -> Rank:
        """A fresh process in the place of a dead one."""
        self.ranks[index].kill()
        self.ranks[index] = Rank(self.address(index))
        return self.ranks[index]

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()


@contextlib.contextmanager
def pool(size: int, kernels: str = "reference") -> Iterator[Pool]:
    """Of ranks that compute with these kernels; a rank put in another's place has the reference."""
    ranks = Pool(size)
    try:
        ranks.each(implementation.select, [(kernels,)] * size)
        yield ranks
    finally:
        ranks.close()


def wait_until(condition: Callable[[], Any], what: str, timeout_seconds: float = 60.0) -> Any:
    """The first true value of `condition`, asked again and again; `what` names it in the error."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_seconds} s: {what}")
        time.sleep(0.01)


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # The server does not take over sys.path by itself.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A store whose host goes away is a fact here; torch would print a stack for it.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(pipe: Connection, parent: int) -> None:
    import torch

    torch.set_num_threads(1)
    while os.getppid() > 1:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args, **kwargs))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
