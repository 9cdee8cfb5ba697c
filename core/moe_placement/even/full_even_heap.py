"""The heap: how full the fullest of alike ranks must be, given how many copies each expert has.

`bound` asks what no numbers of copies can beat; here they are given, and the copies that come
together on a rank decide. Neighbours: `exact_even` looks at numbers of copies in the order of this,
`full_even` swaps no longer than it promises.

Shapes: V numbers of copies, C copies of a layer, R ranks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def least_heap(share_VC: Floats, num_ranks: int, slots: int | None) -> Floats:
    """A load that no rank of the fullest can be below, float64 [V].

    Of the n·R + 1 most loaded copies n + 1 meet on some rank. If ranks have equal slots, the j most
    loaded copies, where no two fit together, are on j ranks with at least the lightest of the rest;
    and with two slots the heaviest beside the lightest is the best there is.

    Args:
        share_VC: load of each copy, most loaded first, 0 for free slots.
        slots: of each rank; None = unequal.
    """
    room = share_VC.shape[1]
    heap_V = share_VC[:, 0].copy()
    sums_VC = np.pad(np.cumsum(share_VC, axis=1), ((0, 0), (1, 0)))
    for together in range(2, room // num_ranks + 2):
        last = (together - 1) * num_ranks + 1
        if last <= room:
            heap_V = np.maximum(heap_V, sums_VC[:, last] - sums_VC[:, last - together])
    if slots is None or slots < 2:
        return heap_V
    if slots == 2:
        folded_VR = share_VC[:, :num_ranks] + share_VC[:, : num_ranks - 1 : -1]
        return np.asarray(np.maximum(heap_V, folded_VR.max(axis=1)))
    lead_R = np.arange(1, num_ranks + 1)
    rest_VR = sums_VC[:, -1:] - sums_VC[:, room - lead_R * (slots - 1)]
    average_VR = (sums_VC[:, lead_R] + rest_VR) / lead_R
    pair_VR = np.full(average_VR.shape, np.inf)
    pair_VR[:, 1:] = share_VC[:, : num_ranks - 1] + share_VC[:, 1:num_ranks]
    return np.asarray(np.maximum(heap_V, np.minimum(average_VR, pair_VR).max(axis=1)))
