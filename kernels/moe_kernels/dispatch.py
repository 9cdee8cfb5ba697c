"""Rows of tokens in the memory that they travel in: to the ranks of their experts, and back.

A rank packs its tokens' rows straight into the bins that are sent, the receiver reads them straight
out of the bins that came, in the order its experts want, and the source adds the experts' rows up
from the buffer they came back in. Its own rows take the same way but for the journey. These
operations move rows and add them in top-k order, so every implementation gives the same bits.

Neighbours: `bins` is the memory; the worker's `dispatch` owns it and sends it; `grouped_gemm` is
what happens between `unpack` and `add_up`.

Letters: t tokens of one rank, K choices a token, P (row, choice) pairs, H hidden, R ranks, S slots
a rank, Q sources of rows, B bins, N rows that came back.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_kernels.bins import Bins, Unpacked
from moe_kernels.implementation import implemented
from moe_kernels.reference import dispatch as reference


@implemented
def pack(
    bins: Bins, x_tH: Tensor, physical_tK: Tensor, slots_per_rank: int, bin_R: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Header and rows for every rank into its bin; (rows, pairs) of each rank.

    `x_tH` float32. `physical_tK` int64: rank · slots_per_rank + slot; what names no rank, as −1,
    goes nowhere. `bin_R`: the bin of each rank, no two the same.
    """
    return reference.pack(bins, x_tH, physical_tK, slots_per_rank, bin_R)


@implemented
def unpack(bins: Bins, sources: Sequence[tuple[int, int]], num_slots: int) -> Unpacked:
    """The rows in the bins of `sources`, (bin, its number of tokens) in the order of the result.

    Raises:
        ForeignSlot: a header names a slot past `num_slots`.
    """
    return reference.unpack(bins, sources, num_slots)


@implemented
def add_up(
    out_tH: Tensor,
    physical_tK: Tensor,
    weights_tK: Tensor,
    slots_per_rank: int,
    own_rank: int,
    own_PH: Tensor,
    own_row_P: Tensor,
    back_NH: Tensor,
    first_R: Sequence[int],
) -> None:
    """out[t] = Σ weights[t, k] · (row of the pair), float32, in order of k, every product and every
    sum rounded; pairs that name no rank add nothing.

    The n-th pair of `own_rank`, in order of token and choice, has its row at own_PH[own_row_P[n]],
    the n-th pair of another rank r at back_NH[first_R[r] + n].
    """
    reference.add_up(
        out_tH, physical_tK, weights_tK, slots_per_rank, own_rank, own_PH, own_row_P, back_NH,
        first_R,
    )  # fmt: skip
