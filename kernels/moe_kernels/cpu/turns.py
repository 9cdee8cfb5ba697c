"""Processes that share a cache folder compile in turn, so that one machine compiles a kernel once.

The ranks of a group start together and want the same kernels: without turns each would compile all
of them, on the same few cores. The lock is the kernel's own (flock), so it ends with the process
that holds it. Who has waited too long, or where there are no such locks, goes on without: it then
compiles what another compiles too, which costs time and nothing else.
Neighbours: `warm_up` takes the turns, `cache` has the folder.
"""

from __future__ import annotations

import fcntl
import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

PATIENCE_SECONDS = 120.0
"""For one step of another process; several times what a step takes on a busy machine."""
_LOOK_SECONDS = 0.05

log = logging.getLogger(__name__)


@contextmanager
def in_turn(
    folder: Path | None, name: str, patience_seconds: float = PATIENCE_SECONDS
) -> Iterator[bool]:
    """Hold the turn of `name` among the processes that use `folder`; false: it is done without."""
    if folder is None:
        yield False
        return
    try:
        file = (folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.lock").open("ab")
    except OSError as error:
        log.warning("kernels: %s without waiting for others: %s", name, error)
        yield False
        return
    with file:
        yield _lock(file, name, time.monotonic() + patience_seconds)


def _lock(file: IO[bytes], name: str, deadline_seconds: float) -> bool:
    is_told = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_seconds:
                log.warning("kernels: %s: another process takes long, not waiting for it", name)
                return False
        except OSError as error:  # a file system without such locks
            log.warning("kernels: %s without waiting for others: %s", name, error)
            return False
        else:
            return True
        if not is_told:
            log.info("kernels: another process compiles %s, waiting for it", name)
            is_told = True
        time.sleep(_LOOK_SECONDS)
