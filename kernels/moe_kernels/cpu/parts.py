"""Who does which part of a kernel's phases.

All threads of a kernel walk through the same phases. In each they take parts, one after the other,
until none is left, and go on when all are done. So nobody waits for a thread that is late or does
not come at all: what it did not take others do. A phase of one part is what a single thread does.

    part = take(board, phase)
    while part < num_parts:
        …
        part = take_next(board, phase)
    meet(board, phase, num_parts)

The number of parts must follow from what stays as it is during the call (shapes, thresholds), never
from what phases write: a late thread asks for it when they have written other things.
Neighbour: `team` has the threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_kernels.cpu.atomics import fetch_add, linger, look
from moe_kernels.cpu.jit import Array, Index, compiled, inner

_LINE = 8
"""Numbers in a line of the cache, so that phases do not disturb each other."""
_TAKEN, _DONE = 0, 1
PARTS_PER_THREAD = 2


@inner
def new_board(num_phases: Index) -> Array:
    """Nothing taken, nothing done."""
    return np.zeros(num_phases * _LINE, np.int64)


@inner
def take(board: Array, phase: Index) -> Any:
    """The next part that nobody has; past the last one if all have been taken."""
    return fetch_add(board, np.int64(phase * _LINE + _TAKEN), np.int64(1))


@inner
def take_next(board: Array, phase: Index) -> Any:
    """The part that was taken is done: the next."""
    fetch_add(board, np.int64(phase * _LINE + _DONE), np.int64(1))
    return take(board, phase)


@inner
def meet(board: Array, phase: Index, num_parts: Index) -> None:
    """Wait until all parts are done."""
    looks = 0
    while look(board, np.int64(phase * _LINE + _DONE)) < num_parts:
        looks += 1
        linger(looks)


@inner
def share(part: Index, parts: Index, count: Index) -> tuple[Index, Index]:
    """Where the part's share of `count` begins and ends."""
    return count * part // parts, count * (part + 1) // parts


@inner
def cut(room: Array, shape: tuple[Index, ...]) -> tuple[Array, Array]:
    """An array at the begin of a room (1D), and the rest of the room."""
    size: Index = 1
    for each in shape:
        size *= each
    return room[:size].reshape(shape), room[size:]


@compiled
def parts_for(threads: Index) -> Any:
    """Of a phase that several threads shall share; several for each, so that one that comes late or
    is held up leaves little to wait for."""
    return threads * PARTS_PER_THREAD if threads > 1 else threads
