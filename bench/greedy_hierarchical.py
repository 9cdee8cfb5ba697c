"""The greedy placement everybody uses, written from its published description: what to beat.

Three steps, for each layer alone: expert groups are packed onto nodes; within a node the next copy
goes to the expert with the largest share until the node's slots are taken; the copies are packed
onto the node's ranks. Packing takes the heaviest item first and puts it where the load is lowest,
every bin with the same number of items. Where groups do not divide by nodes the cluster counts as
one node (global mode). It knows no placement in force, no speeds, and splits evenly.

Neighbours: `placement_loads` judges it, `placement` prints it beside ours.

Shapes: L layers, E logical experts, R ranks, S slots a rank, B rows packed alike (layer or layer ×
node), N items, M bins, C copies of a node.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatBN = npt.NDArray[np.float64]
IntBN = npt.NDArray[np.int64]


class Indivisible(ValueError):
    """Ranks or slots that do not divide, which this method needs."""


def plan(
    load_LE: npt.NDArray[np.float64],
    num_slots: int,
    num_ranks: int,
    num_nodes: int = 1,
    num_groups: int = 1,
) -> npt.NDArray[np.int64]:
    """Expert in each slot, [L, R, S] with S = `num_slots` / `num_ranks`, for an even split.

    Raises:
        Indivisible: slots not a multiple of ranks, or ranks not of nodes.
    """
    if num_slots % num_ranks or num_ranks % num_nodes:
        raise Indivisible(f"{num_slots} slots, {num_ranks} ranks, {num_nodes} nodes must divide")
    num_layers, num_experts = load_LE.shape
    if num_groups % num_nodes or num_experts % num_groups:
        num_nodes = num_groups = 1  # global mode
    expert_BE = _experts_of_nodes(load_LE, num_nodes, num_groups)
    load_BE = np.take_along_axis(load_LE, expert_BE.reshape(num_layers, -1), 1)
    load_BE = load_BE.reshape(expert_BE.shape)
    local_BC, share_BC = _replicate(load_BE, num_slots // num_nodes)
    order_BC = _pack(share_BC, num_ranks // num_nodes)
    chosen_BC = np.take_along_axis(local_BC, order_BC, 1)
    experts_BC = np.take_along_axis(expert_BE, chosen_BC, 1)
    return experts_BC.reshape(num_layers, num_ranks, num_slots // num_ranks)


def _experts_of_nodes(
    load_LE: npt.NDArray[np.float64], num_nodes: int, num_groups: int
) -> npt.NDArray[np.int64]:
    """Experts of each node, [layers × nodes, experts a node]: whole groups, packed by load."""
    num_layers, num_experts = load_LE.shape
    width = num_experts // num_groups
    group_load = load_LE.reshape(num_layers, num_groups, width).sum(axis=2)
    groups = _pack(group_load, num_nodes)
    experts = groups[:, :, None] * width + np.arange(width)
    return np.asarray(experts.reshape(num_layers * num_nodes, num_experts // num_nodes))


def _replicate(load_BE: FloatBN, num_copies: int) -> tuple[IntBN, FloatBN]:
    """(expert of each copy, its even share) [B, C]: each next copy to the largest share."""
    num_rows, num_experts = load_BE.shape
    rows = np.arange(num_rows)
    counts_BE = np.ones((num_rows, num_experts))
    share_BE = load_BE.copy()
    expert_BC = np.empty((num_rows, num_copies), dtype=np.int64)
    expert_BC[:, :num_experts] = np.arange(num_experts)
    for copy in range(num_experts, num_copies):
        largest_B = share_BE.argmax(axis=1)
        expert_BC[:, copy] = largest_B
        counts_BE[rows, largest_B] += 1
        share_BE[rows, largest_B] = load_BE[rows, largest_B] / counts_BE[rows, largest_B]
    return expert_BC, np.take_along_axis(share_BE, expert_BC, 1)


def _pack(weight_BN: FloatBN, num_bins: int) -> IntBN:
    """Items in the order of their bins, [B, N]: bin m holds entries m·N/M up to (m + 1)·N/M.

    Heaviest item first, into the lightest bin that is not full; ties go to the lowest number.
    """
    num_rows, num_items = weight_BN.shape
    per_bin = num_items // num_bins
    rows = np.arange(num_rows)
    order_BN = np.argsort(-weight_BN, axis=1, kind="stable")
    load_BM = np.zeros((num_rows, num_bins))
    filled_BM = np.zeros((num_rows, num_bins), dtype=np.int64)
    out_BN = np.empty((num_rows, num_items), dtype=np.int64)
    for rank in range(num_items):
        item_B = order_BN[:, rank]
        bin_B = load_BM.argmin(axis=1)
        place_B = filled_BM[rows, bin_B]
        out_BN[rows, bin_B * per_bin + place_B] = item_B
        filled_BM[rows, bin_B] = place_B + 1
        load_BM[rows, bin_B] += weight_BN[rows, item_B]
        load_BM[rows[place_B + 1 == per_bin], bin_B[place_B + 1 == per_bin]] = np.inf  # full
    return out_BN
