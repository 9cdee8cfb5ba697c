"""All layers of a rank that is alone in one compiled call.

What a layer has of its own (views of weights and pages, tables, numbers) lies frozen in memory, and
the call is given addresses: a table of them is made once of a `Stack`, but for the column of what
differs from step to step. The kernels are those of the single operations, called by their slots, so
the bits are theirs.
Neighbours: `moe_kernels.stack` is the contract; `frozen` keeps the arguments; `stack_kernel` is
what is called; `forward` does the same with the model's ends around the layers.

Letters: T tokens, H hidden, L layers, P columns of addresses, E logical experts, S slots, K choices
a token.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_kernels import stack as contract
from moe_kernels.attention_step import AttentionStep
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.copies import copy_arrays
from moe_kernels.cpu.experts import expert_arrays
from moe_kernels.cpu.frozen import Frozen
from moe_kernels.cpu.gate import gate_arrays
from moe_kernels.cpu.grouped_query import frozen_step, half_arrays
from moe_kernels.cpu.jit import Array
from moe_kernels.cpu.stack_kernel import STEP, run_layers
from moe_kernels.cpu.team import num_threads
from moe_kernels.kv_error import ErrorProbe
from moe_kernels.stack import Counts, IntArray, Stack, StackLayer


class Alike(NamedTuple):
    """Layers that take the same of a step."""

    layer: StackLayer
    """One of them."""
    numbers: Array
    """Of all."""


class FrozenStack(NamedTuple):
    blocks: list[list[Frozen]]
    """By layer, as in the columns: they own what the addresses lead to."""
    addresses_LP: Array
    likes: tuple[Array, Array, Array]
    """Empty, of what attention's, gates' and experts' matrices store."""
    alike: list[Alike]
    probes: tuple[ErrorProbe, ...]

    def probed(self) -> list[int]:
        """Layers of which somebody wants to see what is stored, which the kernels do not show."""
        return [number for number, probe in enumerate(self.probes) if probe.wanted]


def run_stack(
    x_TH: Tensor, stack: Stack, step: AttentionStep, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """See the contract."""
    frozen = frozen_stack(stack)
    if frozen is None or not len(x_TH) or frozen.probed():
        return contract.composed(x_TH, stack, step, turn_L)
    first = stack.layers[0]
    addresses_LP = frozen.addresses_LP.copy()
    for one, numbers in frozen.alike:
        addresses_LP[numbers, STEP] = frozen_step(one.attention, one.pages, step).address
    out_TH = torch.empty(x_TH.shape)
    chosen_LE = np.zeros((len(stack.layers), len(first.sent_E)), np.int64)
    served_LS = np.empty((len(stack.layers), len(first.experts.w13_S2IH)), np.int64)
    num_strangers = run_layers(
        float32_array(x_TH),
        addresses_LP,
        *frozen.likes,
        turn_L,
        first.gate.spec.top_k,
        num_threads(),
        out_TH.numpy(),
        chosen_LE,
        served_LS,
    )
    return out_TH, Counts(chosen_LE, served_LS, num_strangers)


def frozen_stack(stack: Stack) -> FrozenStack | None:
    """None where the kernels have no code for one of the layers, or layers differ in types."""
    return stack.derived.get("cpu", partial(_frozen, stack))


def _frozen(stack: Stack) -> FrozenStack | None:
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
    return FrozenStack(
        blocks,
        np.array(addresses, np.int64),
        (like_half, like_gate, like_experts),
        [Alike(stack.layers[numbers[0]], np.array(numbers)) for numbers in alike.values()],
        tuple(layer.pages.probe for layer in stack.layers),
    )
