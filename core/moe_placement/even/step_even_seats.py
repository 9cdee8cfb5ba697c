"""Seats: who stays on a rank keeps its slot; who comes takes the lowest slot that is free already,
then the lowest that becomes free.

Planning decides which experts a rank holds, not where; moving a weight within a rank would cost
for nothing. Neighbour: `step_even`.

Shapes: L layers, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import numpy as np

from moe_api.plan import SlotsLRS

_LAST = np.iinfo(np.int32).max


def seated(current_LRS: SlotsLRS, wanted_LRS: SlotsLRS) -> SlotsLRS:
    """The placement `wanted_LRS` with the slots of `current_LRS` kept by all who stay."""
    stays_LRS = _held(current_LRS, wanted_LRS)
    comes_LRS = ~_held(wanted_LRS, current_LRS)
    out_LRS = np.where(stays_LRS, current_LRS, -1).astype(np.int32)
    # Slots in the order they are given away: free now, then vacated, then kept ones (never).
    order_LRS = np.argsort(stays_LRS * 2 + (current_LRS >= 0), axis=2, kind="stable")
    coming_LRS = np.sort(np.where(comes_LRS & (wanted_LRS >= 0), wanted_LRS, _LAST), axis=2)
    there_LRS = np.take_along_axis(out_LRS, order_LRS, 2)
    there_LRS = np.where(coming_LRS < _LAST, coming_LRS, there_LRS)
    np.put_along_axis(out_LRS, order_LRS, there_LRS, 2)
    return out_LRS


def _held(slots_LRS: SlotsLRS, by_LRS: SlotsLRS) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
    """Whether the expert in each slot of the first is on the same rank in the second."""
    same = (slots_LRS[:, :, :, None] == by_LRS[:, :, None, :]).any(axis=3)
    return np.asarray(same & (slots_LRS >= 0))
