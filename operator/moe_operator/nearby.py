"""Should ranks send tokens to near copies first? What it would save, what it would cost in balance.

A plan's fractions say how much each copy serves; whose tokens these are is free as long as ranks'
requests come as the plan assumes (`GroupPlan.sources`). When they come differently, near copies get
more than their share: so near dispatch is used only while it costs next to no balance under what
was really counted. Pure. Neighbours: `origins` (what was counted), `rebalance` (asks, announces),
`moe_placement.topology.borders` (the shares), `placement_status` (tells what crosses).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank, D domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_api.plan import FRACTION_UNITS
from moe_operator.origins import RoutedRLE
from moe_placement import score
from moe_placement.capacity import DomainsR
from moe_placement.decision.window import enough_tokens
from moe_placement.placement import Placement
from moe_placement.score import RankLoadsLR
from moe_placement.topology.borders import all_shares, near

MAX_COST = 1.01
"""Near dispatch begins when no layer's fullest rank gets busier than by this factor."""
GIVE_UP_COST = 1.05
"""And ends beyond this one."""
MIN_SAVING = 0.05
"""Share of all tokens that must stay in their domain for it to be worth a switch."""


@dataclass(frozen=True)
class Dispatch:
    """How a placement's copies are used: by whom, and what that comes to."""

    loads_LR: RankLoadsLR
    """Tokens that each rank receives."""
    crossing: float | None
    """Share of tokens that cross the border; None without tokens."""


def dispatch(
    placement: Placement,
    sources: Sequence[int] | None,
    routed_RLE: RoutedRLE,
    near_R: DomainsR,
    border_R: DomainsR,
) -> Dispatch:
    """What ranks get and what crosses, for tokens as counted.

    Args:
        sources: of the plan in force; None = every rank sends to all copies by their fractions.
        near_R: domains in which copies are near each other (`borders.near`).
        border_R: domains whose border is looked at.
    """
    loads_LR: RankLoadsLR = np.zeros(placement.slots_LRS.shape[:2])
    shares_DLRS, stayed = all_shares(placement, near_R, sources), 0.0
    for near_domain, domain in dict.fromkeys(zip(near_R.tolist(), border_R.tolist(), strict=True)):
        here_R = (near_R == near_domain) & (border_R == domain)
        shares_LRS = shares_DLRS[near_domain]
        sent_LR = score.rank_loads(placement.slots_LRS, shares_LRS, routed_RLE[here_R].sum(axis=0))
        loads_LR += sent_LR
        stayed += float(sent_LR[:, border_R == domain].sum())
    total = float(loads_LR.sum())
    return Dispatch(loads_LR, max(0.0, 1 - stayed / total) if total > 0 else None)


def preferred(
    placement: Placement,
    sources: Sequence[int] | None,
    routed_RLE: RoutedRLE | None,
    domains: Sequence[Sequence[str]],
) -> Sequence[int] | None:
    """The sources that a plan should name: None = no near dispatch; as they are when too little is
    known to change anything.

    Args:
        sources: those of the plan in force.
        routed_RLE: what each rank's requests brought in about a window; None = not known.
    """
    near_R = near(domains)
    if not near_R.any():
        return None
    if routed_RLE is None or not enough_tokens(routed_RLE.sum(axis=0), len(domains)):
        return sources
    plain = dispatch(placement, None, routed_RLE, near_R, near_R)
    if sources is not None:
        in_force = dispatch(placement, sources, routed_RLE, near_R, near_R)
        if _cost(in_force, plain) <= GIVE_UP_COST:
            return sources
    counted = source_units(routed_RLE)
    wanted = dispatch(placement, counted, routed_RLE, near_R, near_R)
    assert plain.crossing is not None, "there are tokens"
    assert wanted.crossing is not None, "there are tokens"
    worth_it = plain.crossing - wanted.crossing >= MIN_SAVING
    return counted if worth_it and _cost(wanted, plain) <= MAX_COST else None


def source_units(routed_RLE: RoutedRLE) -> list[int]:
    """Each rank's share of all tokens in units of 1 / FRACTION_UNITS."""
    tokens_R = routed_RLE.sum(axis=(1, 2))
    return [int(units) for units in np.round(tokens_R / tokens_R.sum() * FRACTION_UNITS)]


def _cost(one: Dispatch, other: Dispatch) -> float:
    """How much busier the fullest rank of a layer gets, at worst; 1 = not at all."""
    other_L = other.loads_LR.max(axis=1)
    busy_L = other_L > 0
    return float((one.loads_LR.max(axis=1)[busy_L] / other_L[busy_L]).max(initial=1.0))
