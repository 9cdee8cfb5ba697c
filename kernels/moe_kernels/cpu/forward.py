"""A whole model's step in one compiled call: token ids to logits.

What the model has of its own lies frozen in memory, as its layers do; the step comes as four arrays
of whole numbers, and all else that kernels take of a step is made of these in here. A step that
does not fit is refused before anything is written, and then goes by the parts, whose words say
what is wrong with it.
Neighbours: `moe_kernels.forward` is the contract; `head`, `step_arrays` and `stack_kernel` are the
parts; `stack` freezes the layers.

Letters: T tokens, S sequences, C columns, H hidden, V vocabulary, P positions, F rotated pairs of a
head, L layers, A columns of addresses, N kinds of layers, B rows that are sampled, E logical
experts, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_kernels import forward as contract
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.frozen import Frozen, freeze, thawing
from moe_kernels.cpu.head import all_below, head_operands, head_rows, stored_rows, widen_rows
from moe_kernels.cpu.jit import Array, Index, compiled
from moe_kernels.cpu.stack import FrozenStack, frozen_stack
from moe_kernels.cpu.stack_kernel import STEP, run_layers
from moe_kernels.cpu.step_arrays import StepLines, kind_of, make_step
from moe_kernels.cpu.team import num_threads
from moe_kernels.forward import Ends
from moe_kernels.grouped_query import meeting
from moe_kernels.kv_pages import show
from moe_kernels.stack import Counts, IntArray, Stack, StackLayer
from moe_kernels.step_tokens import StepTokens

TOP_K, EXPERTS, SLOTS, BLOCKS = range(4)
"""Sizes of a model: choices a token, logical experts, slots, and blocks that all layers have."""
MULTIPLIER, EPS, DIVISOR = range(3)
"""Numbers of a model: of its embedding, and of its head's norm and logits."""
_REFUSED = -1
_NONE = -1


class ModelArrays(NamedTuple):
    embedding_VH: Array
    head_VH: Array
    norm_H: Array
    cos_PF: Array
    sin_PF: Array
    addresses_LA: Array
    kind_L: Array
    kinds_NC: Array
    sizes: Array
    numbers: Array


class _Model(NamedTuple):
    block: Frozen
    address: int
    like_ends: Array
    """Empty, of what embedding and head store."""
    stack: FrozenStack


def forward(
    tokens: StepTokens, ends: Ends, stack: Stack, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """See the contract."""
    model: _Model | None = stack.derived.get(("cpu", ends), partial(_model, ends, stack))
    probed = [] if model is None else model.stack.probed()
    if model is None or len(probed) > 1:
        return contract.composed(tokens, ends, stack, turn_L)
    num_strangers, logits_BV, chosen_LE, served_LS, seen_TH = forward_rows(
        model.address,
        *model.stack.likes,
        model.like_ends,
        turn_L,
        tokens.ids,
        tokens.spans_SC,
        tokens.blocks,
        tokens.sample_rows,
        tokens.block_size,
        *_sight(stack, probed),
        num_threads(),
    )
    if num_strangers == _REFUSED:
        return contract.composed(tokens, ends, stack, turn_L)
    if probed:
        _probe(torch.from_numpy(seen_TH), tokens, ends, stack.layers[probed[0]])
    return torch.from_numpy(logits_BV), Counts(chosen_LE, served_LS, int(num_strangers))


def _sight(stack: Stack, probed: Sequence[int]) -> tuple[int, int]:
    """The layer that is to be seen, and of how many tokens."""
    if not probed:
        return _NONE, 0
    return probed[0], stack.layers[probed[0]].pages.probe.max_tokens


def _probe(seen_TH: Tensor, tokens: StepTokens, ends: Ends, layer: StackLayer) -> None:
    """Let the layer's probe see the step's first tokens; `seen_TH` is what the layer was given of
    them."""
    positions_T, slots_T = (each[: len(seen_TH)] for each in tokens.places())
    angles = ends.cos_PF[positions_T], ends.sin_PF[positions_T]
    _, k_TKD, v_TKD = meeting(seen_TH, layer.attention, *angles)
    show(layer.pages, k_TKD, v_TKD, slots_T)


def _model(ends: Ends, stack: Stack) -> _Model | None:
    """None where the kernels have no code for it."""
    layers = frozen_stack(stack)
    embedding_VH, head = stored_rows(ends.embedding), head_operands(ends.head)
    if layers is None or embedding_VH.dtype != head.rows_VH.dtype:
        return None
    kind_L = np.empty(len(stack.layers), np.int64)
    for number, kind in enumerate(layers.alike):
        kind_L[kind.numbers] = number
    first = stack.layers[0]
    num_blocks = min(layer.pages.num_blocks for layer in stack.layers)
    sizes = first.gate.spec.top_k, len(first.sent_E), len(first.experts.w13_S2IH), num_blocks
    numbers = ends.embedding.multiplier, head.eps, head.divisor
    block = Frozen(
        ModelArrays(
            embedding_VH,
            head.rows_VH,
            head.norm_H,
            float32_array(ends.cos_PF),
            float32_array(ends.sin_PF),
            layers.addresses_LP,
            kind_L,
            np.stack([kind_of(kind.layer.attention) for kind in layers.alike]),
            np.array(sizes, np.int64),
            np.array(numbers, np.float32),
        )
    )
    return _Model(block, block.address, np.empty(0, embedding_VH.dtype), layers)


def _model_kind(stored: Any) -> Any:
    """The type of `ModelArrays` to kernels, of ends that store numbers of this type."""
    matrix, floats = (types.Array(of, 2, "C") for of in (stored, types.float32))
    table, wholes = types.Array(types.int64, 2, "C"), types.Array(types.int64, 1, "C")
    row = types.Array(types.float32, 1, "C")
    members = [matrix, matrix, row, floats, floats, table, wholes, table, wholes, row]
    return types.NamedTuple(members, ModelArrays)


_model_at = thawing(_model_kind)


@compiled
def forward_rows(
    address: int,
    like_half: Array,
    like_gate: Array,
    like_experts: Array,
    like_ends: Array,
    turn_L: Array,
    ids_T: Array,
    spans_SC: Array,
    blocks: Array,
    sample_rows_B: Array,
    block_size: int,
    probed: int,
    num_seen: int,
    threads: int,
) -> tuple[Index, Array, Array, Array, Array]:
    """The number of strangers, logits, what was counted, and what the layer `probed` (−1 = none)
    was given of the first `num_seen` tokens. The number is −1, and nothing done, where the step
    does not fit the model."""
    model = _model_at(address, like_ends)
    sizes, numbers = model.sizes, model.numbers
    vocabulary, hidden = model.head_VH.shape
    num_layers, num_rows = model.kind_L.size, sample_rows_B.size
    logits_BV = np.empty((num_rows, vocabulary), np.float32)
    chosen_LE = np.zeros((num_layers, sizes[EXPERTS]), np.int64)
    served_LS = np.empty((num_layers, sizes[SLOTS]), np.int64)
    seen_TH = np.empty((0, hidden), np.float32)
    num_strangers: Index = np.int64(_REFUSED)
    if not (
        _spans_fit(spans_SC, block_size, ids_T.size, blocks.size, model.cos_PF.shape[0])
        and all_below(blocks, sizes[BLOCKS])
        and all_below(ids_T, model.embedding_VH.shape[0])
        and all_below(sample_rows_B, ids_T.size)
    ):
        return num_strangers, logits_BV, chosen_LE, served_LS, seen_TH
    lines = _lines(spans_SC, blocks)
    cos_TF, sin_TF, slots_T = _places(lines, block_size, ids_T.size, model.cos_PF, model.sin_PF)
    held = []
    addresses_LA = model.addresses_LA.copy()
    for number in range(model.kinds_NC.shape[0]):
        step = make_step(cos_TF, sin_TF, slots_T, lines, model.kinds_NC[number], threads)
        block = freeze(step)
        held.append((step, block))
        for layer in range(num_layers):
            if model.kind_L[layer] == number:
                addresses_LA[layer, STEP] = block.ctypes.data
    x_TH = np.empty((ids_T.size, hidden), np.float32)
    out_TH = np.empty_like(x_TH)
    widen_rows(ids_T, model.embedding_VH, numbers[MULTIPLIER], x_TH)
    num_strangers = 0
    border = max(probed, 0)
    for first, end in ((0, border), (border, num_layers)):
        if first == probed:
            seen_TH = x_TH[:num_seen].copy()
        if first < end:
            num_strangers += run_layers(
                x_TH, addresses_LA[first:end], like_half, like_gate, like_experts,
                turn_L[first:end], sizes[TOP_K], threads, out_TH, chosen_LE[first:end],
                served_LS[first:end],
            )  # fmt: skip
            x_TH[:] = out_TH
    held.clear()  # until here the layers have read of them
    head_rows(
        x_TH, sample_rows_B, model.norm_H, numbers[EPS], model.head_VH, numbers[DIVISOR],
        logits_BV, threads,
    )  # fmt: skip
    return num_strangers, logits_BV, chosen_LE, served_LS, seen_TH


@compiled
def _spans_fit(
    spans_SC: Array, block_size: int, num_tokens: int, num_blocks: int, num_positions: int
) -> bool:
    """Whether they are those of so many tokens and blocks, at least one token, each with a block
    and within the positions."""
    tokens = tables = 0
    for seq in range(spans_SC.shape[0]):
        start, count, length = spans_SC[seq, 0], spans_SC[seq, 1], spans_SC[seq, 2]
        end = start + count
        if start < 0 or count < 0 or end > num_positions or length * block_size < end:
            return False
        tokens += count
        tables += length
    return tokens == num_tokens and tables == num_blocks and num_tokens > 0


@compiled
def _lines(spans_SC: Array, blocks: Array) -> StepLines:
    num_sequences = spans_SC.shape[0]
    start_S, num_tokens_S = np.empty(num_sequences, np.int64), np.empty(num_sequences, np.int64)
    first_row_S, first_block_S = np.empty_like(start_S), np.empty_like(start_S)
    tokens = tables = 0
    for seq in range(num_sequences):
        start_S[seq], num_tokens_S[seq] = spans_SC[seq, 0], spans_SC[seq, 1]
        first_row_S[seq], first_block_S[seq] = tokens, tables
        tokens += spans_SC[seq, 1]
        tables += spans_SC[seq, 2]
    return StepLines(start_S, num_tokens_S, first_row_S, first_block_S, blocks)


@compiled
def _places(
    lines: StepLines, block_size: int, num_tokens: int, cos_PF: Array, sin_PF: Array
) -> tuple[Array, Array, Array]:
    """The angles and the slot of every token."""
    cos_TF = np.empty((num_tokens, cos_PF.shape[1]), np.float32)
    sin_TF = np.empty_like(cos_TF)
    slots_T = np.empty(num_tokens, np.int64)
    row = 0
    for seq in range(lines.start_S.size):
        table = lines.blocks[lines.first_block_S[seq] :]
        for position in range(lines.start_S[seq], lines.start_S[seq] + lines.num_tokens_S[seq]):
            cos_TF[row], sin_TF[row] = cos_PF[position], sin_PF[position]
            slots_T[row] = table[position // block_size] * block_size + position % block_size
            row += 1
    return cos_TF, sin_TF, slots_T
