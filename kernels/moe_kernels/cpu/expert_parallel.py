"""What a rank does of a layer between two exchanges, one compiled call each.

Neighbours: `moe_kernels.expert_parallel` is the contract; `stack` keeps a layer's arguments frozen;
`stack_kernel` says where; `dispatch` and the layers' kernels are the parts.

Letters: T tokens, K choices a token, H hidden, E logical experts, R ranks, S slots, Q sources of
rows, N pairs in order of source, token and choice, A columns of addresses; BI and BW: bins as int32
and as stored numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_kernels import expert_parallel as contract
from moe_kernels.attention_step import AttentionStep
from moe_kernels.bins import Bins, ForeignSlot
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.copies import place
from moe_kernels.cpu.dispatch import (
    add_rows,
    arrays_of,
    first_row,
    pack_rows,
    source_lines,
    unpack_rows,
)
from moe_kernels.cpu.experts import ExpertArrays, ExpertNumbers, add_expert_rows
from moe_kernels.cpu.gate import route_rows
from moe_kernels.cpu.grouped_gemm import expert_rows
from moe_kernels.cpu.grouped_query import frozen_step
from moe_kernels.cpu.grouped_query_kernel import attention_half
from moe_kernels.cpu.jit import Array, Index, compiled
from moe_kernels.cpu.stack import frozen_stack
from moe_kernels.cpu.stack_kernel import (
    COPIES,
    EXPERTS,
    GATE,
    HALF,
    copies_at,
    experts_at,
    gate_at,
    half_at,
    step_at,
)
from moe_kernels.cpu.team import num_threads
from moe_kernels.expert_parallel import Dispatched, Served
from moe_kernels.stack import Stack


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
    """See the contract."""
    frozen, layer = frozen_stack(stack), stack.layers[number]
    if frozen is None or not len(x_TH) or layer.pages.probe.wanted:
        return contract.composed_dispatch(
            x_TH, stack, number, step, turn, bins, slots_per_rank, bin_R
        )
    header_BI, room_BW = arrays_of(bins)
    like_half, like_gate, _ = frozen.likes
    middle_TH, normed_TH, physical_TK, weights_TK, counts_2R, chosen_E, strangers = dispatch_layer(
        float32_array(x_TH),
        frozen.addresses_LP[number],
        frozen_step(layer.attention, layer.pages, step).address,
        like_half,
        like_gate,
        turn,
        layer.gate.spec.top_k,
        header_BI,
        room_BW,
        first_row(bins, len(x_TH)),
        np.array(bin_R, np.int64),
        slots_per_rank,
        num_threads(),
    )
    rows_R, pairs_R = counts_2R.tolist()
    return Dispatched(
        torch.from_numpy(middle_TH),
        torch.from_numpy(normed_TH),
        torch.from_numpy(physical_TK),
        torch.from_numpy(weights_TK),
        rows_R,
        pairs_R,
        chosen_E,
        int(strangers),
    )


def serve_rows(bins: Bins, sources: Sequence[tuple[int, int]], stack: Stack, number: int) -> Served:
    """See the contract."""
    frozen = frozen_stack(stack)
    if frozen is None:
        return contract.composed_serve(bins, sources, stack, number)
    header_BI, room_BW = arrays_of(bins)
    y_NH, pairs_Q, served_S, is_valid = serve_layer(
        header_BI,
        room_BW,
        source_lines(bins, sources),
        bins.layout.top_k,
        frozen.addresses_LP[number],
        frozen.likes[2],
        num_threads(),
    )
    if not is_valid:
        raise ForeignSlot(len(served_S))
    return Served(torch.from_numpy(y_NH), pairs_Q.tolist(), served_S)


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
    """See the contract."""
    frozen = frozen_stack(stack)
    if frozen is None or not len(dispatched.middle_TH):
        return contract.composed_combine(
            dispatched, slots_per_rank, own_rank, own_NH, back_NH, first_R, stack, number
        )
    out_TH = combine_layer(
        dispatched.middle_TH.numpy(),
        float32_array(dispatched.normed_TH),
        dispatched.physical_TK.contiguous().numpy(),
        float32_array(dispatched.weights_TK),
        slots_per_rank,
        own_rank,
        own_NH.numpy(),
        back_NH.numpy(),
        np.array(first_R, np.int64),
        frozen.addresses_LP[number],
        frozen.likes[2],
        num_threads(),
    )
    return torch.from_numpy(out_TH)


@compiled
def dispatch_layer(
    x_TH: Array,
    at_A: Array,
    step_address: int,
    like_half: Array,
    like_gate: Array,
    turn: int,
    top_k: int,
    header_BI: Array,
    room_BW: Array,
    first: int,
    bin_R: Array,
    slots_per_rank: int,
    threads: int,
) -> tuple[Array, Array, Array, Array, Array, Array, Index]:
    """`Dispatched`, with rows and pairs of all ranks as one array."""
    num_tokens = x_TH.shape[0]
    middle_TH, normed_TH = np.empty_like(x_TH), np.empty_like(x_TH)
    ids_TK = np.empty((num_tokens, top_k), np.int64)
    physical_TK = np.empty_like(ids_TK)
    weights_TK = np.empty((num_tokens, top_k), np.float32)
    step, partials = step_at(step_address, at_A)
    attention_half(x_TH, half_at(at_A[HALF], like_half), step, partials, middle_TH)
    gate = gate_at(at_A[GATE], like_gate)
    route_rows(middle_TH, gate, normed_TH, ids_TK, weights_TK, threads)
    copies, sent_E = copies_at(at_A[COPIES], at_A)
    chosen_E = np.zeros(sent_E.size, np.int64)
    strangers = place(ids_TK, copies, sent_E, turn, physical_TK, chosen_E)
    counts_2R = np.zeros((2, bin_R.size), np.int64)
    pack_rows(normed_TH, physical_TK, slots_per_rank, bin_R, header_BI, room_BW, first, counts_2R)
    return middle_TH, normed_TH, physical_TK, weights_TK, counts_2R, chosen_E, strangers


@compiled
def serve_layer(
    header_BI: Array,
    room_BW: Array,
    lines_Q3: Array,
    top_k: int,
    at_A: Array,
    like_experts: Array,
    threads: Index,
) -> tuple[Array, Array, Array, bool]:
    """`Served`; false where a header names a slot past the last."""
    routed, _, numbers = experts_at(at_A[EXPERTS], like_experts)
    hidden = routed.w13_SIH.shape[1]
    num_slots = routed.w2_SHI.shape[0] // hidden
    rows_PH, offsets, row_N, pairs_Q, is_valid = unpack_rows(
        header_BI, room_BW, lines_Q3, top_k, hidden, num_slots
    )
    y_NH = np.empty_like(rows_PH)
    if is_valid:
        y_PH = np.empty_like(rows_PH)
        expert_rows(
            rows_PH, offsets, routed.w13_SIH, routed.w2_SHI, routed.b13_SI, routed.b2_SH,
            numbers.is_silu, numbers.limit, numbers.alpha, y_PH, threads,
        )  # fmt: skip
        for pair in range(row_N.size):
            y_NH[pair] = y_PH[row_N[pair]]
    return y_NH, pairs_Q, offsets[1:] - offsets[:-1], is_valid


@compiled
def combine_layer(
    middle_TH: Array,
    normed_TH: Array,
    physical_TK: Array,
    weights_TK: Array,
    slots_per_rank: int,
    own_rank: int,
    own_NH: Array,
    back_NH: Array,
    first_R: Array,
    at_A: Array,
    like_experts: Array,
    threads: int,
) -> Array:
    out_TH = np.empty_like(middle_TH)
    add_rows(
        out_TH, physical_TK, weights_TK, slots_per_rank, own_rank, own_NH,
        np.arange(own_NH.shape[0]), back_NH, first_R,
    )  # fmt: skip
    routed, shared, numbers = experts_at(at_A[EXPERTS], like_experts)
    if shared.w2_HJ.size > 0:
        _add_shared(normed_TH, ExpertArrays(routed, shared, _alone(numbers)), threads, out_TH)
    for token in range(out_TH.shape[0]):
        middle_H, out_H = middle_TH[token], out_TH[token]
        for column in range(out_H.size):
            out_H[column] = middle_H[column] + out_H[column] * numbers.multiplier
    return out_TH


@compiled
def _add_shared(normed_TH: Array, experts: ExpertArrays, threads: int, out_TH: Array) -> None:
    num_tokens = normed_TH.shape[0]
    dense_TH = np.empty_like(normed_TH)
    add_expert_rows(
        normed_TH[:0], normed_TH, np.empty((num_tokens, 0), np.int64),
        np.empty((num_tokens, 0), np.float32), experts, dense_TH, np.empty(0, np.int64), threads,
    )  # fmt: skip
    for token in range(num_tokens):
        for column in range(dense_TH.shape[1]):
            out_TH[token, column] += dense_TH[token, column]


@compiled
def _alone(numbers: ExpertNumbers) -> ExpertNumbers:
    """Without the layer's multiplier, which is for the sum of all experts."""
    return ExpertNumbers(numbers.is_silu, numbers.limit, numbers.alpha, np.float32(1.0))
