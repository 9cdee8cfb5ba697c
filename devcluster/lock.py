"""One at a time: an advisory lock on a file, freed by the kernel when its holder dies."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from devcluster.errors import DeadlineExceeded
from devcluster.progress import Say


@contextmanager
def locked(path: Path, seconds: float, say: Say, what: str) -> Iterator[None]:
    """Hold the lock `path`; wait for its holder up to `seconds`, saying so.

    The holder may remove the file, as its last act.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _try_lock(path)
    if descriptor is None:
        say(f"waiting for {what} (lock {path})")
        deadline = time.monotonic() + seconds
        while (descriptor := _try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"waited {seconds:g} s for {what}; it holds the lock {path}")
            time.sleep(0.1)
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path) -> int | None:
    """Return the open file that holds the lock, None when somebody else has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last holder may have removed the file between our opening and locking it: then the
        # next one to come opens another.
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None
