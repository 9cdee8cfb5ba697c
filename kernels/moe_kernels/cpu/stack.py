"""All layers of a rank that is alone in one compiled call.

What a layer has of its own (views of weights and pages, tables, numbers) lies frozen in memory, and
the call is given addresses: a table of them is made once of a `Stack`, but for the column of what
differs from step to step. The kernels are those of the single operations, called by their slots, so
the bits are theirs.
Neighbours: `moe_kernels.stack` is the contract; `frozen` keeps the arguments; `grouped_query`,
`gate`, `copies` and `experts` have the kernels.

Letters: T tokens, H hidden, L layers, P columns of addresses, E logical experts, S slots, K choices
a token.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_kernels import stack as contract
from moe_kernels.attention_step import AttentionStep
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.attention_chunks import PARTIALS
from moe_kernels.cpu.copies import COPY_ARRAYS, copy_arrays, place
from moe_kernels.cpu.experts import add_expert_rows, expert_arrays, expert_kind
from moe_kernels.cpu.frozen import Frozen, thawing
from moe_kernels.cpu.gate import gate_arrays, gate_kind, route_rows
from moe_kernels.cpu.grouped_query import half_arrays, step_arrays
from moe_kernels.cpu.grouped_query_kernel import STEP_ARRAYS, attention_half, half_kind
from moe_kernels.cpu.jit import Array, compiled, num_threads
from moe_kernels.stack import IntArray, Passed, Stack, StackLayer

_STEP, _HALF, _GATE, _COPIES, _EXPERTS = range(5)
"""Columns of addresses; what is frozen at each but the first stays for the life of the stack."""
_step_at = thawing(lambda _: types.Tuple([STEP_ARRAYS, PARTIALS]))
_half_at = thawing(half_kind)
_gate_at = thawing(gate_kind)
_copies_at = thawing(lambda _: types.Tuple([COPY_ARRAYS, types.Array(types.int64, 1, "C")]))
_experts_at = thawing(expert_kind)


class _FrozenStack(NamedTuple):
    blocks: list[list[Frozen]]
    """By layer, as in the columns: they own what the addresses lead to."""
    addresses_LP: Array
    like_half: Array
    like_gate: Array
    like_experts: Array
    """Empty, of what attention's, gates' and experts' matrices store."""
    alike: list[tuple[StackLayer, Array]]
    """Layers that take the same of a step: one of them, and the numbers of all."""


def run_stack(x_TH: Tensor, stack: Stack, step: AttentionStep, turn_L: IntArray) -> Passed:
    """See the contract."""
    layers = stack.layers
    frozen: _FrozenStack | None = stack.derived.get("cpu", partial(_frozen, stack))
    if frozen is None or not len(x_TH) or any(layer.pages.probe.wanted for layer in layers):
        return contract.composed(x_TH, stack, step, turn_L)
    first = layers[0]
    steps = [Frozen(step_arrays(one.attention, one.pages, step)) for one, _ in frozen.alike]
    addresses_LP = frozen.addresses_LP.copy()
    for of_step, (_, numbers) in zip(steps, frozen.alike, strict=True):
        addresses_LP[numbers, _STEP] = of_step.address
    out_TH = torch.empty(x_TH.shape)
    chosen_LE = np.zeros((len(layers), len(first.sent_E)), np.int64)
    served_LS = np.empty((len(layers), len(first.experts.w13_S2IH)), np.int64)
    num_strangers = run_layers(
        float32_array(x_TH),
        addresses_LP,
        frozen.like_half,
        frozen.like_gate,
        frozen.like_experts,
        turn_L,
        first.gate.spec.top_k,
        num_threads(),
        out_TH.numpy(),
        chosen_LE,
        served_LS,
    )
    return Passed(out_TH, torch.from_numpy(chosen_LE), torch.from_numpy(served_LS), num_strangers)


def _frozen(stack: Stack) -> _FrozenStack | None:
    """None where the kernels have no code for one of the layers, or layers differ in types."""
    blocks: list[list[Frozen]] = []
    stored: set[tuple[np.dtype[Any], ...]] = set()
    alike: dict[tuple[Hashable, ...], list[int]] = {}
    for number, layer in enumerate(stack.layers):
        half = half_arrays(layer.attention, layer.pages)
        if half is None:
            return None
        gate = gate_arrays(layer.gate)
        experts = expert_arrays(layer.experts, layer.shared, layer.multiplier)
        copies = copy_arrays(layer.copies), layer.sent_E.numpy()
        blocks.append([Frozen(each) for each in (half, gate, copies, experts)])
        stored.add((half.layer.qkv_QH.dtype, gate.gate_EH.dtype, experts.routed.w13_SIH.dtype))
        attention = layer.attention
        key = attention.window, attention.num_heads, attention.num_kv_heads
        alike.setdefault((*key, layer.pages.num_blocks), []).append(number)
    if len(stored) > 1:
        return None
    like_half, like_gate, like_experts = (np.empty(0, dtype) for dtype in stored.pop())
    addresses = [[0, *(block.address for block in of_layer)] for of_layer in blocks]
    return _FrozenStack(
        blocks,
        np.array(addresses, np.int64),
        like_half,
        like_gate,
        like_experts,
        [(stack.layers[numbers[0]], np.array(numbers)) for numbers in alike.values()],
    )


@compiled
def run_layers(
    x_TH: Array,
    addresses_LP: Array,
    like_half: Array,
    like_gate: Array,
    like_experts: Array,
    turn_L: Array,
    top_k: int,
    threads: int,
    out_TH: Array,
    chosen_LE: Array,
    served_LS: Array,
) -> int:
    """Fills the last three, `chosen_LE` from zero; returns the number of strangers."""
    num_tokens = x_TH.shape[0]
    middle_TH, normed_TH = np.empty_like(x_TH), np.empty_like(x_TH)
    ids_TK = np.empty((num_tokens, top_k), np.int64)
    slots_TK = np.empty_like(ids_TK)
    weights_TK = np.empty((num_tokens, top_k), np.float32)
    out_TH[:] = x_TH
    num_strangers = 0
    for layer in range(addresses_LP.shape[0]):
        at_P = addresses_LP[layer]
        step, partials = _step_at(at_P[_STEP], at_P)
        attention_half(out_TH, _half_at(at_P[_HALF], like_half), step, partials, middle_TH)
        gate = _gate_at(at_P[_GATE], like_gate)
        route_rows(middle_TH, gate, normed_TH, ids_TK, weights_TK, threads)
        copies, sent_E = _copies_at(at_P[_COPIES], at_P)
        num_strangers += place(ids_TK, copies, sent_E, turn_L[layer], slots_TK, chosen_LE[layer])
        experts = _experts_at(at_P[_EXPERTS], like_experts)
        add_expert_rows(
            middle_TH, normed_TH, slots_TK, weights_TK, experts, out_TH, served_LS[layer], threads
        )
    return num_strangers
