"""A layer whose experts are on several ranks, in what a rank does between two exchanges.

Until rows leave: attention, gate, choice of copies and packing (`dispatch_rows`); when rows have
come: the experts of this rank (`serve_rows`); when they are back: their sum (`combine_rows`). Each
is a handful of operations on a few rows, so an implementation may do it in one call. What it
computes are the compositions below, with the same bits.
Neighbours: `stack` has the layers, `dispatch` and `bins` the rows under way; the worker's expert
layers move them between these calls.

Letters: T tokens, K choices a token, H hidden, E logical experts, R ranks, S slots, Q sources of
rows, N pairs (row, choice) in order of source, token and choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.bins import Bins
from moe_kernels.copies import place_choices
from moe_kernels.dispatch import add_up, pack, unpack
from moe_kernels.gate import route
from moe_kernels.grouped_query import grouped_query
from moe_kernels.implementation import implemented
from moe_kernels.mlp import Mlp, mlp
from moe_kernels.stack import IntArray, Stack


class Dispatched(NamedTuple):
    """A layer's tokens, of which rows are under way."""

    middle_TH: Tensor
    """After attention, float32."""
    normed_TH: Tensor
    physical_TK: Tensor
    """Int64, see `dispatch.pack`."""
    weights_TK: Tensor
    rows_R: list[int]
    pairs_R: list[int]
    chosen_E: IntArray
    num_strangers: int


class Served(NamedTuple):
    y_NH: Tensor
    """Float32, contiguous."""
    pairs_Q: list[int]
    served_S: IntArray


@implemented
def dispatch_rows(
    x_TH: Tensor,
    stack: Stack,
    number: int,
    step: AttentionStep,
    turn: int,
    bins: Bins,
    slots_per_rank: int,
    bin_R: Sequence[int],
) -> Dispatched:
    """Float32 `x_TH` through layer `number` of the stack up to its experts, whose rows are packed;
    the step's tokens are written to the layer's pages.

    Args:
        turn: of `place_choices`.
        slots_per_rank, bin_R: of `dispatch.pack`.
    """
    return composed_dispatch(x_TH, stack, number, step, turn, bins, slots_per_rank, bin_R)


def composed_dispatch(
    x_TH: Tensor,
    stack: Stack,
    number: int,
    step: AttentionStep,
    turn: int,
    bins: Bins,
    slots_per_rank: int,
    bin_R: Sequence[int],
) -> Dispatched:
    """`dispatch_rows` by the contracts of its parts."""
    layer = stack.layers[number]
    middle_TH = grouped_query(x_TH, layer.attention, layer.pages, step)
    normed_TH, ids_TK, weights_TK = route(middle_TH, layer.gate)
    physical_TK, chosen_E, num_strangers = place_choices(ids_TK, layer.copies, layer.sent_E, turn)
    rows_R, pairs_R = pack(bins, normed_TH, physical_TK, slots_per_rank, bin_R)
    return Dispatched(
        middle_TH, normed_TH, physical_TK, weights_TK, rows_R, pairs_R,
        chosen_E.cpu().numpy(), num_strangers,
    )  # fmt: skip


@implemented
def serve_rows(bins: Bins, sources: Sequence[tuple[int, int]], stack: Stack, number: int) -> Served:
    """The rows in the bins of `sources`, see `dispatch.unpack`, through the experts of a layer.

    Raises:
        ForeignSlot: a header names a slot that this rank has not.
    """
    return composed_serve(bins, sources, stack, number)


def composed_serve(
    bins: Bins, sources: Sequence[tuple[int, int]], stack: Stack, number: int
) -> Served:
    """`serve_rows` by the contracts of its parts."""
    experts = stack.layers[number].experts
    unpacked = unpack(bins, sources, len(experts.w13_S2IH))
    y_PH = experts.run(unpacked.rows_PH, unpacked.offsets)
    served_S = unpacked.offsets.diff().cpu().numpy()
    return Served(y_PH.index_select(0, unpacked.row_P), list(unpacked.pairs_Q), served_S)


@implemented
def combine_rows(
    dispatched: Dispatched,
    slots_per_rank: int,
    own_rank: int,
    own_NH: Tensor,
    back_NH: Tensor,
    first_R: Sequence[int],
    stack: Stack,
    number: int,
) -> Tensor:
    """The layer's output float32 [T, H]: what attention left, and what the experts add to it.

    The n-th pair of `own_rank` has its row at own_NH[n], that of another rank r at
    back_NH[first_R[r] + n].
    """
    return composed_combine(
        dispatched, slots_per_rank, own_rank, own_NH, back_NH, first_R, stack, number
    )


def composed_combine(
    dispatched: Dispatched,
    slots_per_rank: int,
    own_rank: int,
    own_NH: Tensor,
    back_NH: Tensor,
    first_R: Sequence[int],
    stack: Stack,
    number: int,
) -> Tensor:
    """`combine_rows` by the contracts of its parts."""
    layer, middle_TH = stack.layers[number], dispatched.middle_TH
    out_TH = torch.empty_like(middle_TH)
    own_row_N = torch.arange(len(own_NH), device=own_NH.device)
    add_up(
        out_TH, dispatched.physical_TK, dispatched.weights_TK, slots_per_rank,
        own_rank, own_NH, own_row_N, back_NH, first_R,
    )  # fmt: skip
    return add_routed(middle_TH, out_TH, dispatched.normed_TH, layer.shared, layer.multiplier)


def add_routed(
    x_TH: Tensor, routed_TH: Tensor, normed_TH: Tensor, shared: Mlp | None, multiplier: float
) -> Tensor:
    """x + multiplier · (the routed experts' sum, which may be written to, + the shared one)."""
    if shared is not None:
        routed_TH += mlp(normed_TH, shared)
    return x_TH + (routed_TH if multiplier == 1.0 else routed_TH * multiplier)
