"""Spread: the copies of an expert in several failure domains, so that losing one loses no expert.

A last step on any plan: while an expert's copies sit in fewer domains than wanted, one of them
changes places with a copy (or a free slot) of a domain that has none, such that the fullest rank
stays as it is if possible and the tokens that change places are alike. Number of copies and slots
stay. Neighbours: `planner` (asks for it as `topology.replicaSpread` says), `copy_limits` (how many
copies there are to be spread).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank; C copies of an expert (at
most), N = R · S slots of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.capacity import DomainsR, SlotsR, SpeedsR
from moe_placement.score import LoadLE, rank_loads

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

FEWEST_TOKENS = 1e-3
"""A token that changes places counts like this part of one on the fullest rank."""


class UnderSpread(NamedTuple):
    """An expert whose copies could be in more domains, by their number."""

    layer: int
    expert: int
    domains: int
    wanted: int


def under_spread(slots_LRS: SlotsLRS, domains_R: DomainsR, min_domains: int) -> list[UnderSpread]:
    """Experts with several copies that are in fewer domains than min_domains, the number of their
    copies and the number of domains allow; by layer and expert."""
    counts_LED = _counts(slots_LRS, domains_R)
    have_LE, wanted_LE = _have_and_want(counts_LED, min_domains, len(np.unique(domains_R)))
    return [
        UnderSpread(layer, expert, int(have_LE[layer, expert]), int(wanted_LE[layer, expert]))
        for layer, expert in np.argwhere(have_LE < wanted_LE).tolist()
    ]


def spread(
    slots_LRS: SlotsLRS,
    fractions_LRS: FractionsLRS,
    load_LE: LoadLE,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    domains_R: DomainsR,
    min_domains: int,
) -> tuple[SlotsLRS, FractionsLRS]:
    """The placement with copies that changed places until `under_spread` finds nothing, or nothing
    that a change of two places helps.

    Fractions go with their copies, so that a plan's split stays what it was; what that costs in
    balance another split can win back. The most loaded experts come first.
    """
    slots_LRS, fractions_LRS = slots_LRS.copy(), fractions_LRS.copy()
    num_domains = len(np.unique(domains_R))
    hopeless_LE = np.zeros((len(slots_LRS), int(slots_LRS.max(initial=0)) + 1), dtype=np.bool_)
    # A change brings an expert into one more domain, and before the next each may be tried once.
    for _ in range((slots_LRS[0].size + 1) * (hopeless_LE.shape[1] + 1)):
        counts_LED = _counts(slots_LRS, domains_R)
        have_LE, wanted_LE = _have_and_want(counts_LED, min_domains, num_domains)
        short_LE = (have_LE < wanted_LE) & ~hopeless_LE
        layer_B = np.flatnonzero(short_LE.any(axis=1))
        if not len(layer_B):
            break
        load_BE = load_LE[layer_B, : short_LE.shape[1]]
        expert_B = np.argmax(np.where(short_LE[layer_B], load_BE, -1.0), axis=1)
        allowed_BCN, from_BC = _allowed(
            slots_LRS[layer_B], slots_R, domains_R, expert_B,
            counts_LED[layer_B], have_LE[layer_B] > wanted_LE[layer_B],
        )  # fmt: skip
        cost_BCN = _cost(
            slots_LRS[layer_B], fractions_LRS[layer_B], load_LE[layer_B], speeds_R, from_BC
        )
        best_B = np.argmin(
            np.where(allowed_BCN, cost_BCN, np.inf).reshape(len(layer_B), -1), axis=1
        )
        copy_B, to_B = np.divmod(best_B, allowed_BCN.shape[2])
        rows = np.arange(len(layer_B))
        done_B = allowed_BCN[rows, copy_B, to_B]
        for array_LRS in (slots_LRS, fractions_LRS):
            _swap(array_LRS, layer_B[done_B], from_BC[rows, copy_B][done_B], to_B[done_B])
        # What was not possible may be so after a change in the layer.
        hopeless_LE[layer_B[done_B]] = False
        hopeless_LE[layer_B[~done_B], expert_B[~done_B]] = True
    return slots_LRS, fractions_LRS


def _counts(slots_LRS: SlotsLRS, domains_R: DomainsR) -> Ints:
    """Copies of each expert in each domain, [L, E, D]."""
    layers_N, ranks_N, slots_N = np.nonzero(slots_LRS >= 0)
    dims = (len(slots_LRS), int(slots_LRS.max(initial=0)) + 1, int(domains_R.max()) + 1)
    out = np.zeros(dims, dtype=np.int64)
    np.add.at(out, (layers_N, slots_LRS[layers_N, ranks_N, slots_N], domains_R[ranks_N]), 1)
    return out


def _have_and_want(counts_LED: Ints, min_domains: int, num_domains: int) -> tuple[Ints, Ints]:
    copies_LE = counts_LED.sum(axis=2)
    return (counts_LED > 0).sum(axis=2), np.minimum(copies_LE, min(min_domains, num_domains))


def _allowed(
    slots_BRS: SlotsLRS,
    slots_R: SlotsR,
    domains_R: DomainsR,
    expert_B: Ints,
    counts_BED: Ints,
    rich_BE: Flags,
) -> tuple[Flags, Ints]:
    """Which slots may change places with which copy of the layer's expert [B, C, N], and the slots
    [B, C] of its copies that have another one in their domain.

    Args:
        rich_BE: experts in more domains than they must be.
    """
    num_layers, num_ranks, width = slots_BRS.shape
    rows, rank_N = np.arange(num_layers), np.repeat(np.arange(num_ranks), width)
    domain_N = domains_R[rank_N]
    item_BN = slots_BRS.reshape(num_layers, -1)
    here_BD = counts_BED[rows, expert_B]
    crowded_BN = (item_BN == expert_B[:, None]) & (here_BD[:, domain_N] > 1)
    num_copies = int(crowded_BN.sum(axis=1).max())
    from_BC = np.argsort(~crowded_BN, axis=1, kind="stable")[:, :num_copies]
    room_BR = (slots_BRS >= 0).sum(axis=2) < slots_R
    target_BN = (here_BD[:, domain_N] == 0) & ((item_BN >= 0) | room_BR[:, rank_N])

    other_BN = np.maximum(item_BN, 0)
    on_rank_BCSN = slots_BRS[rows[:, None], rank_N[from_BC]][..., None] == item_BN[:, None, None, :]
    both_BCN = on_rank_BCSN.any(axis=2) & (item_BN >= 0)[:, None]
    last_BN = counts_BED[rows[:, None], other_BN, domain_N] == 1
    met_BCN = counts_BED[rows[:, None, None], other_BN[:, None], domain_N[from_BC][..., None]] > 0
    poor_BN = ~rich_BE[rows[:, None], other_BN] & (item_BN >= 0)
    allowed_BCN = target_BN[:, None] & ~both_BCN & ~(met_BCN & (last_BN & poor_BN)[:, None])
    return allowed_BCN & np.take_along_axis(crowded_BN, from_BC, 1)[..., None], from_BC


def _cost(
    slots_BRS: SlotsLRS,
    fractions_BRS: FractionsLRS,
    load_BE: LoadLE,
    speeds_R: SpeedsR,
    from_BC: Ints,
) -> npt.NDArray[np.float64]:
    """Highest load ÷ speed of the layer after a change of places [B, C, N]; among equals those come
    first that move fewest tokens."""
    num_layers, num_ranks, width = slots_BRS.shape
    rows, rank_N = np.arange(num_layers)[:, None], np.repeat(np.arange(num_ranks), width)
    token_BN = (
        load_BE[rows[..., None], np.maximum(slots_BRS, 0)] * fractions_BRS * (slots_BRS >= 0)
    ).reshape(num_layers, -1)
    loads_BR = rank_loads(slots_BRS, fractions_BRS, load_BE)
    top_B11 = (loads_BR / speeds_R).max(axis=1)[:, None, None]
    from_rank_BC = rank_N[from_BC]
    mine_BC1 = np.take_along_axis(token_BN, from_BC, 1)[..., None]
    shift_BCN, moved_BCN = mine_BC1 - token_BN[:, None], mine_BC1 + token_BN[:, None]
    from_BCN = (loads_BR[rows, from_rank_BC][..., None] - shift_BCN) / speeds_R[from_rank_BC][
        ..., None
    ]
    to_BCN = (loads_BR[:, None, rank_N] + shift_BCN) / speeds_R[rank_N]
    peak_BCN = np.maximum(np.maximum(from_BCN, to_BCN), top_B11)
    return np.asarray(peak_BCN + FEWEST_TOKENS * moved_BCN / speeds_R.max())


def _swap(array_LRS: npt.NDArray[np.generic], layer_B: Ints, from_B: Ints, to_B: Ints) -> None:
    flat_LN = array_LRS.reshape(len(array_LRS), -1)
    kept_B = flat_LN[layer_B, from_B].copy()
    flat_LN[layer_B, from_B] = flat_LN[layer_B, to_B]
    flat_LN[layer_B, to_B] = kept_B
