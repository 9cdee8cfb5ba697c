"""Where logical experts live: logical → physical ids, and which copy serves which token.

One immutable table per epoch, built while the epoch is staged and put in force by one assignment,
all layers at once. Which copy serves a token never changes a result, only who works: the choice
follows the plan's fractions, by the sequence of low discrepancy of `moe_kernels.copies`, so that
shares are right within one big batch and over thousands of small ones alike.

Its start differs by layer, expert and member: experts that always occur together, layers and ranks
are not in phase, and experts with few tokens do not all favour the copy on the lowest rank. Its
turn differs from step to step, so that no place in the batch is tied to a copy, whatever the
batch's size.

Neighbours: `moe_api.plan` is where slots and fractions come from, `topology.borders` of
`moe_placement` makes a rank's own shares of them when near copies come first, `layer` keeps the
counts n, `dispatch` sends by physical id = rank × slots_per_rank + slot.

Letters: T tokens, K choices, L layers, E logical experts, C copies of one expert at most, R ranks,
S slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_api.plan import FractionsLRS, GroupPlan, SlotsLRS
from moe_kernels.copies import POINT_BITS, Copies, place_choices
from moe_placement.placement import Placement
from moe_placement.topology.borders import near, shares_from

_ALL_BITS = (1 << 64) - 1
_STEPS_AHEAD = 64
_MEMBER_STEP = 13348189408090370666
"""2⁶⁴ · (5 + √5) ÷ 10: starts of members 0, 1, 2 … are a low-discrepancy sequence too, and no small
multiple of 1 ÷ φ apart: ranks a few tokens ahead of each other do not fall into step."""


@dataclass(frozen=True, eq=False)
class RoutingTable:
    num_experts: int
    slots_per_rank: int
    copies_L: tuple[Copies, ...]

    @classmethod
    def of_plan(
        cls, plan: GroupPlan, rank: int, num_experts: int, device: str | torch.device = "cpu"
    ) -> RoutingTable:
        """The table that a rank of a plan routes its tokens by.

        Raises:
            ValueError: as `build`.
        """
        placement = Placement(plan.slots(), plan.fractions())
        near_R = near([member.domains for member in plan.members])
        shares_LRS = shares_from(int(near_R[rank]), placement, near_R, plan.sources)
        member = plan.members[rank].id
        return cls.build(placement.slots_LRS, shares_LRS, num_experts, member, device)

    @classmethod
    def build(
        cls,
        slots_LRS: SlotsLRS,
        fractions_LRS: FractionsLRS,
        num_experts: int,
        member: int,
        device: str | torch.device = "cpu",
    ) -> RoutingTable:
        """The table of a placement.

        Args:
            fractions_LRS: share of its expert's tokens per slot that this member sends there.
            member: whose tokens are sent.

        Raises:
            ValueError: an expert without a slot or an id outside the model, by layer.
        """
        num_layers, num_ranks, slots_per_rank = slots_LRS.shape
        flat_LP = slots_LRS.reshape(num_layers, num_ranks * slots_per_rank)
        check_covered(slots_LRS, num_experts)
        layer_N, physical_N = np.nonzero(flat_LP >= 0)
        expert_N = flat_LP[layer_N, physical_N]
        copies_LE = np.zeros((num_layers, num_experts), dtype=np.int64)
        np.add.at(copies_LE, (layer_N, expert_N), 1)
        max_copies = int(copies_LE.max())

        # Pairs sorted by (layer, expert, physical id): place within the expert = copy number.
        order = np.lexsort((physical_N, expert_N, layer_N))
        layer_N, expert_N, physical_N = layer_N[order], expert_N[order], physical_N[order]
        first_N = np.searchsorted(
            layer_N * num_experts + expert_N, layer_N * num_experts + expert_N
        )
        copy_N = np.arange(len(order)) - first_N
        physical_LEC = np.full((num_layers, num_experts, max_copies), -1, dtype=np.int64)
        physical_LEC[layer_N, expert_N, copy_N] = physical_N
        share_LEC = np.zeros((num_layers, num_experts, max_copies), dtype=np.float64)
        share_LEC[layer_N, expert_N, copy_N] = fractions_LRS.reshape(flat_LP.shape)[
            layer_N, physical_N
        ]
        edges_LEC = _edges(share_LEC, copies_LE)
        start_LE = _starts(num_layers, num_experts, member)

        def layer(number: int) -> Copies:
            most = int(copies_LE[number].max())
            return Copies(
                torch.from_numpy(physical_LEC[number, :, :most].copy()).to(device),
                torch.from_numpy(edges_LEC[number, :, :most].copy()).to(device),
                torch.from_numpy(start_LE[number].copy()).to(device),
            )

        return cls(num_experts, slots_per_rank, tuple(layer(n) for n in range(num_layers)))

    def to_physical(
        self, layer: int, ids_TK: Tensor, sent_E: Tensor, step: int
    ) -> tuple[Tensor, Tensor, int]:
        """`place_choices` of a layer.

        Args:
            ids_TK: int64 logical ids, −1 for none.
            sent_E: int64 [E], tokens this rank has sent to each expert of the layer before.
            step: number of the step, for the turn by which places in the batch get their points.
        """
        return place_choices(ids_TK, self.copies_L[layer], sent_E, int(turns(layer, 1, step)[0, 0]))


def check_covered(slots_LRS: SlotsLRS, num_experts: int) -> None:
    """Raise ValueError unless every expert has a slot in every layer and no id is a stranger."""
    for layer in range(slots_LRS.shape[0]):
        held = set(np.unique(slots_LRS[layer]).tolist()) - {-1}
        strangers = sorted(e for e in held if not 0 <= e < num_experts)
        if strangers:
            raise ValueError(
                f"layer {layer}: slots name experts {strangers[:5]}, the model has 0 to "
                f"{num_experts - 1}"
            )
        missing = sorted(set(range(num_experts)) - held)
        if missing:
            raise ValueError(f"layer {layer}: no slot holds experts {missing[:5]}")


def _edges(
    share_LEC: npt.NDArray[np.float64], copies_LE: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Cumulative shares as integers; the last copy's edge is exactly the end of the interval."""
    whole = np.int64(1) << POINT_BITS
    total_LE1 = share_LEC.sum(axis=2, keepdims=True)
    # An expert whose fractions are all zero is split evenly rather than sent nowhere.
    is_copy_LEC = np.arange(share_LEC.shape[2]) < copies_LE[..., None]
    share_LEC = np.where(total_LE1 > 0, share_LEC, is_copy_LEC)
    sums_LEC = share_LEC.cumsum(axis=2)
    edges: npt.NDArray[np.int64] = np.round(sums_LEC / sums_LEC[..., -1:] * whole).astype(np.int64)
    edges[np.arange(share_LEC.shape[2]) >= copies_LE[..., None] - 1] = whole
    return edges


def _starts(num_layers: int, num_experts: int, member: int) -> npt.NDArray[np.int64]:
    """Scattered over the unit interval by layer and expert, evenly spread by member."""
    numbers = np.arange(num_layers * num_experts, dtype=np.uint64)
    starts = _scattered(numbers) + np.uint64(member * _MEMBER_STEP & _ALL_BITS)
    return starts.astype(np.int64).reshape(num_layers, num_experts)


def turns(
    first_layer: int, num_layers: int, first_step: int, num_steps: int = 1
) -> npt.NDArray[np.int64]:
    """A number of up to 62 bits for each of neighbouring layers in each step, int64 by step."""
    layers = np.arange(first_layer, first_layer + num_layers)
    steps = np.arange(first_step, first_step + num_steps)
    numbers = ((steps[:, None] << 12) + layers).astype(np.uint64)
    return (_scattered(numbers) >> np.uint64(2)).astype(np.int64)


class Turns:
    """Those of some layers, made for many steps at once: a dozen calls for a few numbers."""

    def __init__(self, first_layer: int, num_layers: int) -> None:
        self._layers = first_layer, num_layers
        self._first_step = 0
        self._made = turns(*self._layers, 0, _STEPS_AHEAD)

    def of(self, step: int) -> npt.NDArray[np.int64]:
        """By layer."""
        if not 0 <= step - self._first_step < _STEPS_AHEAD:
            self._first_step, self._made = step, turns(*self._layers, step, _STEPS_AHEAD)
        turn_L: npt.NDArray[np.int64] = self._made[step - self._first_step]
        return turn_L


def _scattered(n: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Well-scattered 64 bits: the finaliser of splitmix64."""
    n = n * np.uint64(0x9E3779B97F4A7C15)
    n = (n ^ (n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    n = (n ^ (n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return n ^ (n >> np.uint64(31))
