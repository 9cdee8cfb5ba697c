"""Whole layers one after the other, where all chosen experts are on this rank.

A decode step of a few tokens spends as much on the calls between a layer's operations as on some of
the operations, and a rank that is alone has nothing to do between them. What it computes is
`composed`: the contracts of a layer's two halves, layer by layer, with the same bits.
Neighbours: `grouped_query`, `gate`, `copies` and `experts` are the parts; the worker's expert
layers make a `Stack` while a table of slots is in force.

Letters: T tokens, H hidden, L layers, E logical experts, S slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.copies import Copies, place_choices
from moe_kernels.derived import Derived
from moe_kernels.experts import Experts, add_experts
from moe_kernels.gate import Gate, route
from moe_kernels.grouped_query import GroupedQueryLayer, grouped_query
from moe_kernels.implementation import implemented
from moe_kernels.kv_pages import KvPages
from moe_kernels.mlp import Mlp

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class StackLayer:
    attention: GroupedQueryLayer
    pages: KvPages
    gate: Gate
    copies: Copies
    sent_E: Tensor
    """See `place_choices`; numbers may be written into it between steps."""
    experts: Experts
    shared: Mlp | None = None
    multiplier: float = 1.0
    """Of what the experts add."""


@dataclass(frozen=True, eq=False)
class Stack:
    """At least one layer; all have the same numbers of experts, slots and choices a token."""

    layers: tuple[StackLayer, ...]
    derived: Derived = field(default_factory=Derived)


class Counts(NamedTuple):
    """On the CPU, where they are added up."""

    chosen_LE: IntArray
    """Tokens that chose each expert."""
    served_LS: IntArray
    """Rows that each slot got."""
    num_strangers: int
    """Ids that named no expert, of all layers."""


@implemented
def run_stack(
    x_TH: Tensor, stack: Stack, step: AttentionStep, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """Float32 `x_TH` through all layers, new, and what they counted; the step's tokens are written
    to their pages. T may be 0.

    Args:
        turn_L: int64, of `place_choices` in each layer.
    """
    return composed(x_TH, stack, step, turn_L)


def composed(
    x_TH: Tensor, stack: Stack, step: AttentionStep, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """`run_stack` by the contracts of its parts."""
    chosen, served, num_strangers = [], [], 0
    for layer, turn in zip(stack.layers, turn_L, strict=True):
        x_TH = grouped_query(x_TH, layer.attention, layer.pages, step)
        normed_TH, ids_TK, weights_TK = route(x_TH, layer.gate)
        slots_TK, chosen_E, strangers = place_choices(ids_TK, layer.copies, layer.sent_E, int(turn))
        x_TH, served_S = add_experts(
            x_TH,
            normed_TH,
            slots_TK,
            weights_TK,
            layer.experts,
            shared=layer.shared,
            multiplier=layer.multiplier,
        )
        chosen.append(chosen_E.cpu().numpy())
        served.append(served_S.cpu().numpy())
        num_strangers += strangers
    return x_TH, Counts(np.stack(chosen), np.stack(served), num_strangers)
