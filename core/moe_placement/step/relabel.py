"""Relabel: which rank takes which part of a new plan, so that little has to be moved.

A plan made from nothing does not care which of two alike ranks gets what. Exchanging the contents
of ranks with as many slots and the same speed changes nothing about balance, and an assignment of
contents to ranks (`assignment`, exact) makes the most of what lies where already. Neighbours:
`full_fractions`, `full_even` (make such plans), `placement.received` (counts what is moved).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank, D domains; of ranks that are
alike: N; K pairs of a content and a rank that share an expert.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.capacity import DomainsR, SlotsR, SpeedsR
from moe_placement.placement import Placement
from moe_placement.step.assignment import Weights, assign

Ints = npt.NDArray[np.int64]

MAX_PAIRS = 1 << 22
"""Contents × ranks looked at in one go: bounds memory."""


def relabel(
    target: Placement,
    current_LRS: SlotsLRS,
    speeds_R: SpeedsR,
    slots_R: SlotsR,
    domains_R: DomainsR,
    *,
    within_domains: bool = False,
) -> Placement:
    """The same contents on other ranks, layer by layer: with the fewest experts received, and of
    such ones that with most of them received from the own domain. Experts that stay keep their
    slots, the others are in the lowest free ones.

    Args:
        target: fills no more than `slots_R`.
        within_domains: contents stay in their domain, because they were made for it.
    """
    alike_RA = np.column_stack([slots_R, speeds_R, domains_R if within_domains else slots_R])
    group_R = np.unique(alike_RA, axis=0, return_inverse=True)[1].reshape(-1)
    num_layers, num_ranks = target.slots_LRS.shape[:2]
    content_LR = np.tile(np.arange(num_ranks), (num_layers, 1))
    for group in range(int(group_R.max()) + 1):
        ranks_N = np.flatnonzero(group_R == group)
        if len(ranks_N) > 1:
            to_LN = _best_ranks(target.slots_LRS[:, ranks_N], current_LRS, ranks_N, domains_R)
            content_LR[:, ranks_N] = ranks_N[np.argsort(to_LN, axis=1)]
    layers = np.arange(num_layers)[:, None]
    moved = Placement(
        target.slots_LRS[layers, content_LR], target.fractions_LRS[layers, content_LR]
    )
    slots_LRS = in_their_slots(moved.slots_LRS, current_LRS)
    return Placement(slots_LRS, _along(moved, slots_LRS))


def _best_ranks(
    target_LNS: SlotsLRS, current_LRS: SlotsLRS, ranks_N: Ints, domains_R: DomainsR
) -> Ints:
    """Where the content of each of some alike ranks should go, as a number among them."""
    num_experts = int(max(target_LNS.max(), current_LRS.max())) + 1
    row_K, column_K, shared_K = _shared(target_LNS, current_LRS[:, ranks_N], num_experts)
    domain_D, kinds_N = np.unique(domains_R[ranks_N], return_inverse=True)
    near_LND = _near(target_LNS, current_LRS, domains_R, domain_D, num_experts)
    # One expert less to receive counts more than all that could come from the own domain.
    own_K = shared_K * (target_LNS[0].size + 1)
    own_K += near_LND.reshape(-1, len(domain_D))[row_K, kinds_N[column_K % len(ranks_N)]]
    return assign(Weights(row_K, column_K, own_K, near_LND, kinds_N))


def _shared(target_LNS: SlotsLRS, current_LNS: SlotsLRS, num_experts: int) -> tuple[Ints, ...]:
    """Contents and ranks that share experts, flat [L · N] and ascending, and how many."""
    num_layers, num_ranks = target_LNS.shape[:2]
    found = []
    step = max(1, MAX_PAIRS // num_ranks**2)
    for start in range(0, num_layers, step):
        wants_M, row_M = _by_expert(target_LNS[start : start + step], num_experts)
        has_M, column_M = _by_expert(current_LNS[start : start + step], num_experts)
        first_M, end_M = np.searchsorted(has_M, wants_M), np.searchsorted(has_M, wants_M, "right")
        size_M = end_M - first_M
        before_M = np.cumsum(size_M) - size_M
        column_P = column_M[np.repeat(first_M - before_M, size_M) + np.arange(int(size_M.sum()))]
        pair_P = np.repeat(row_M, size_M) * num_ranks + column_P % num_ranks
        shared = np.bincount(pair_P)
        pair_K = np.flatnonzero(shared)
        row_K = pair_K // num_ranks
        column_K = row_K // num_ranks * num_ranks + pair_K % num_ranks
        found.append((start * num_ranks + row_K, start * num_ranks + column_K, shared[pair_K]))
    return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))


def _near(
    target_LNS: SlotsLRS,
    current_LRS: SlotsLRS,
    domains_R: DomainsR,
    domain_D: DomainsR,
    num_experts: int,
) -> Ints:
    """How many experts of each content someone in each domain holds; 0 for a single domain."""
    near_LND = np.zeros((*target_LNS.shape[:2], len(domain_D)), dtype=np.int64)
    if len(domain_D) == 1:
        return near_LND
    there_LED = np.zeros((len(target_LNS), num_experts, len(domain_D)), dtype=np.bool_)
    layer_M, rank_M, slot_M = np.nonzero((current_LRS >= 0) & np.isin(domains_R, domain_D)[:, None])
    domain_M = np.searchsorted(domain_D, domains_R[rank_M])
    there_LED[layer_M, current_LRS[layer_M, rank_M, slot_M], domain_M] = True
    layers = np.arange(len(target_LNS))[:, None]
    for slot in range(target_LNS.shape[2]):
        wants_LN = target_LNS[:, :, slot]
        near_LND += there_LED[layers, wants_LN] & (wants_LN >= 0)[:, :, None]
    return near_LND


def _by_expert(slots_LNS: SlotsLRS, num_experts: int) -> tuple[Ints, Ints]:
    """Experts, numbered through all layers, ascending, and the flat rank of each copy."""
    slot_M = np.flatnonzero(slots_LNS >= 0)
    rank_M = slot_M // slots_LNS.shape[2]
    expert_M = slots_LNS.reshape(-1)[slot_M] + rank_M // slots_LNS.shape[1] * num_experts
    order_M = np.argsort(expert_M, kind="stable")
    return expert_M[order_M], rank_M[order_M]


def in_their_slots(slots_LRS: SlotsLRS, current_LRS: SlotsLRS) -> SlotsLRS:
    """The same experts on each rank: those it holds now where they are, the others in the lowest
    slots left. As wide as the wider of the two."""
    width = max(slots_LRS.shape[2], current_LRS.shape[2])
    out_LRS = np.full((*slots_LRS.shape[:2], width), -1, dtype=np.int32)
    same_LRSS = (slots_LRS[:, :, :, None] == current_LRS[:, :, None, :]) & (slots_LRS >= 0)[
        :, :, :, None
    ]
    stays_LRS = same_LRSS.any(axis=3)
    at = np.nonzero(stays_LRS)
    out_LRS[at[0], at[1], same_LRSS.argmax(axis=3)[at]] = slots_LRS[at]
    free_LRS = np.argsort(out_LRS >= 0, axis=2, kind="stable")
    comes_LRS = (slots_LRS >= 0) & ~stays_LRS
    nth_LRS = np.cumsum(comes_LRS, axis=2) - 1
    at = np.nonzero(comes_LRS)
    out_LRS[at[0], at[1], free_LRS[at[0], at[1], nth_LRS[at]]] = slots_LRS[at]
    return out_LRS


def _along(placement: Placement, slots_LRS: SlotsLRS) -> FractionsLRS:
    """Fractions of the same experts on each rank, in the order of `slots_LRS`."""
    fractions_LRS = np.zeros(slots_LRS.shape)
    for slot in range(placement.slots_LRS.shape[2]):
        same_LRS = slots_LRS == placement.slots_LRS[:, :, slot, None]
        same_LRS &= slots_LRS >= 0
        fractions_LRS += same_LRS * placement.fractions_LRS[:, :, slot, None]
    return fractions_LRS
