"""One at a time: an advisory lock on a file, freed by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.progress import Say
from devcluster.waiting import wait_until


@contextmanager
def locked(path: Path, seconds: float, say: Say, what: str) -> Iterator[None]:
    """Hold the lock `path`; wait for its holder up to `seconds`, saying so.

    The file stays: removing it would let two holders in, one on each inode.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if not _try_lock(descriptor):
            say(f"waiting for {what} (lock {path})")
            wait_until(lambda: _try_lock(descriptor), seconds, f"{what}; it holds the lock {path}")
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
