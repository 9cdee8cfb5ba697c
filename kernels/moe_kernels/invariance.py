"""Whether a row's bits may depend on what shares its call; a switch of the process, as is
`implementation`.

Required, which is the usual case, every product keeps the promise of `linear`. Not required, an
implementation may take what is faster: `reference` leaves tiles and multiplies all rows in one call
of the library. `cpu` has nothing to take: its kernels were measured to be as fast as the library in
float32, and far ahead of it with bfloat16 weights on processors without instructions for those.
Neighbours: workers set it from `WorkerConfig.batch_invariant`; `reference.linear` asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_required = True


def require(wanted: bool) -> None:
    """From now on, for the whole process."""
    global _required
    _required = wanted


def required() -> bool:
    return _required


@contextmanager
def using(wanted: bool) -> Iterator[None]:
    """For tests and comparisons, while nothing else runs: required or not for a while."""
    before = _required
    require(wanted)
    try:
        yield
    finally:
        require(before)
