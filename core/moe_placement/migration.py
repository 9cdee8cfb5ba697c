"""From one placement to another: the moves between two epochs, and the walk of epochs to a target.

`diff` is derived by every rank alone from the two plans, so nothing is negotiated. `next_wave` is
the operator's: one epoch that fits the free slots, in which every expert has a slot before, during
and after.

Shapes: L MoE layers, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS


@dataclass(frozen=True)
class Move:
    """One expert's weights to bring into a slot. `sources` are its holders under the plan in force,
    nearest first, as (rank, slot); empty = only the checkpoint has it."""

    layer: int
    expert: int
    rank: int
    slot: int
    sources: tuple[tuple[int, int], ...]


def diff(
    old_LRS: SlotsLRS, new_LRS: SlotsLRS, domains: Sequence[Sequence[str]] | None = None
) -> list[Move]:
    """Moves that make `new` out of `old`: wherever it names an expert that the slot did not hold.

    Args:
        domains: per rank its topology domains, broad to narrow; holders sharing more come first.

    Returns moves ordered by layer, rank, slot. The order of equally near holders is rotated by the
    receiver's rank, so that the ranks do not all ask the same one.
    """
    moves = []
    for layer, rank, slot in np.argwhere((new_LRS >= 0) & (new_LRS != old_LRS)).tolist():
        expert = int(new_LRS[layer, rank, slot])
        holders = [(int(r), int(s)) for r, s in np.argwhere(old_LRS[layer] == expert)]
        holders.sort(key=lambda holder: _distance(holder, rank, old_LRS.shape[1], domains))
        moves.append(Move(layer, expert, rank, slot, tuple(holders)))
    return moves


def next_wave(current_LRS: SlotsLRS, target_LRS: SlotsLRS, max_moves: int) -> SlotsLRS | None:
    """The next epoch on the way to `target`, or None when no free slot lets it get any nearer.

    Each rank takes at most one arrival per layer, into its lowest free slot; a copy that the
    target does not want is retired in the same epoch when the new table holds the expert
    elsewhere. What counts is which rank holds what: an expert that is already on its target rank
    stays in the slot it has.
    """
    wave = current_LRS.copy()
    arrivals = 0
    for layer in range(wave.shape[0]):
        for rank in range(wave.shape[1]):
            wanted = _missing(current_LRS[layer, rank], target_LRS[layer, rank])
            free = np.flatnonzero(wave[layer, rank] < 0)
            if wanted and len(free) and arrivals < max_moves:
                wave[layer, rank, free[0]] = wanted[0]
                arrivals += 1
        _retire(wave, current_LRS, target_LRS, layer)
    return None if np.array_equal(wave, current_LRS) else wave


def reached(current_LRS: SlotsLRS, target_LRS: SlotsLRS) -> bool:
    """True when every rank holds exactly what the target wants, in whichever slots."""
    return bool(np.array_equal(np.sort(current_LRS, axis=2), np.sort(target_LRS, axis=2)))


def _retire(wave: SlotsLRS, current: SlotsLRS, target: SlotsLRS, layer: int) -> None:
    """Free the slots of `layer` that the target does not want, never an expert's last one."""
    for rank in range(wave.shape[1]):
        for expert in _missing(target[layer, rank], current[layer, rank]):
            slots = np.argwhere(wave[layer] == expert)
            if len(slots) > 1:
                wave[layer, rank][wave[layer, rank] == expert] = -1


def _missing(have_S: npt.NDArray[np.int32], want_S: npt.NDArray[np.int32]) -> list[int]:
    """Experts of `want` that `have` lacks, in ascending order."""
    return sorted({int(e) for e in want_S if e >= 0} - {int(e) for e in have_S if e >= 0})


def _distance(
    holder: tuple[int, int], rank: int, num_ranks: int, domains: Sequence[Sequence[str]] | None
) -> tuple[bool, int, int]:
    shared = 0
    if domains is not None:
        for mine, theirs in zip(domains[rank], domains[holder[0]], strict=True):
            if mine != theirs:
                break
            shared += 1
    return (holder[0] != rank, -shared, (holder[0] - rank) % num_ranks)
