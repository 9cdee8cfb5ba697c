"""Explain: why an expert has its copies, where its tokens go, and what a placement gave up.

Nothing is remembered from planning: every reason is found again from the placement and the load,
by asking what would be without a copy, or with other fractions. So it holds as well for a
placement that somebody else made. Neighbours: `shortfall` (what keeps a layer above the bound),
`split` (what would be without a copy), `dispatch` (whose tokens go where).

Shapes: L MoE layers, E logical experts, R ranks, S physical slots a rank, D domains, C copies of
one expert; 1 = a single layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from moe_api.plan import FractionsLRS, SlotsLRS, even_fractions
from moe_placement import bound, score, shortfall, split
from moe_placement.capacity import Capacity
from moe_placement.placement import Placement
from moe_placement.score import LoadLE
from moe_placement.shortfall import TOLERANCE, Demands
from moe_placement.topology import dispatch

NO_DEMANDS = Demands()


@dataclass(frozen=True)
class LayerStory:
    layer: int
    tokens: float
    fair: float
    """Tokens of a rank of speed 1 if all shared alike."""
    bound: float
    """No placement has a smaller largest load ÷ speed."""
    largest: float
    limits: tuple[str, ...]
    """Why the bound is above the fair share."""
    given_up: tuple[str, ...]
    """Why the largest is above the bound, and what else was asked for and is not so."""
    crossing: float | None
    """Share of the assignments that leave their domain if all ranks send alike; None where there is
    one domain."""


@dataclass(frozen=True)
class CopyStory:
    rank: int
    slot: int
    domain: int
    fraction: float
    tokens: float
    why: str


@dataclass(frozen=True)
class Sent:
    """Where the tokens of one domain go."""

    domain: int
    tokens: float
    shares: tuple[float, ...]
    """In the order of the expert's copies."""


@dataclass(frozen=True)
class ExpertStory:
    layer: int
    expert: int
    tokens: float
    times_fair: float
    """Its load ÷ the fair load of a rank."""
    needed: int
    """With fewer copies some rank would have to be above the bound."""
    why: str
    copies: tuple[CopyStory, ...]
    sent: tuple[Sent, ...]
    """One for each domain; empty where there is one domain."""


def explain_layer(
    placement: Placement,
    load_LE: LoadLE,
    capacity: Capacity,
    layer: int,
    demands: Demands = NO_DEMANDS,
) -> LayerStory:
    """What keeps a layer from being perfect."""
    one, load_1E = _only(placement, load_LE, layer)
    to_plan = capacity.only(capacity.open_R)
    level = _level(load_1E, to_plan, demands)
    fair = float(load_1E.sum() / to_plan.speeds_R.sum())
    return LayerStory(
        layer=layer,
        tokens=float(load_1E.sum()),
        fair=fair,
        bound=level,
        largest=shortfall.largest(one, load_1E, capacity.speeds_R),
        limits=tuple(shortfall.above_fair(load_1E[0], to_plan, demands, fair, level)),
        given_up=(
            *shortfall.above_bound(one, load_1E, capacity, level),
            *shortfall.held_back(load_1E, to_plan, demands, level),
            *shortfall.not_spread(one, capacity, demands),
        ),
        crossing=shortfall.crossing(one, load_1E, capacity),
    )


def explain_expert(
    placement: Placement,
    load_LE: LoadLE,
    capacity: Capacity,
    layer: int,
    expert: int,
    demands: Demands = NO_DEMANDS,
) -> ExpertStory:
    """Why an expert has its copies, and which of them serves whom."""
    one, load_1E = _only(placement, load_LE, layer)
    to_plan = capacity.only(capacity.open_R)
    level = _level(load_1E, to_plan, demands)
    fair = float(load_1E.sum() / to_plan.speeds_R.sum())
    tokens = float(load_1E[0, expert])
    needed = shortfall.copies_needed(tokens, level, to_plan.speeds_R)
    rank_C, slot_C = np.nonzero(one.slots_LRS[0] == expert)
    why_C = _why_copies(one, load_1E, capacity, expert, demands)
    copies = []
    for rank, slot, why in zip(rank_C.tolist(), slot_C.tolist(), why_C, strict=True):
        fraction = float(one.fractions_LRS[0, rank, slot])
        domain = int(capacity.domains_R[rank])
        copies.append(CopyStory(rank, slot, domain, fraction, fraction * tokens, why))
    return ExpertStory(
        layer=layer,
        expert=expert,
        tokens=tokens,
        times_fair=tokens / fair if fair > 0 else 0.0,
        needed=needed,
        why=_why_expert(tokens, level, needed, len(copies), demands),
        copies=tuple(copies),
        sent=tuple(_sent(one, load_1E, capacity, expert)),
    )


def _only(placement: Placement, load_LE: LoadLE, layer: int) -> tuple[Placement, LoadLE]:
    part = slice(layer, layer + 1)
    return Placement(placement.slots_LRS[part], placement.fractions_LRS[part]), load_LE[part]


def _level(load_1E: LoadLE, to_plan: Capacity, demands: Demands) -> float:
    """What no placement of a single layer can beat."""
    copies = demands.copies.within_reach(load_1E.shape[1], to_plan.slots_R)
    return float(
        bound.lower_bound(
            load_1E, to_plan.slots_R, to_plan.speeds_R, copies.max_copies, copies.min_copies
        )[0]
    )


def _why_expert(tokens: float, level: float, needed: int, copies: int, demands: Demands) -> str:
    if not copies:
        return "it has no copy: its tokens can not be served"
    if tokens <= 0:
        return "no tokens in this load; it has a copy so that it can be served"
    times = f"{tokens / level:.2f} times what a rank should carry"
    if needed > copies:
        limit = " (maxReplicas)" if copies == demands.copies.max_copies else ""
        return f"{times}: it would need {needed} copies, it has {copies}{limit}"
    if needed > 1:
        return f"{times}: it needs {needed} copies or more, it has {copies}"
    if copies > 1:
        return f"{times}: it would fit on one; its pieces fill up ranks that have room"
    return f"{times}: it fits on one"


def _why_copies(
    one: Placement, load_1E: LoadLE, capacity: Capacity, expert: int, demands: Demands
) -> list[str]:
    """For each copy, what would be without it."""
    rank_C, slot_C = np.nonzero(one.slots_LRS[0] == expert)
    if len(rank_C) < 2:
        return ["the only copy"] * len(rank_C)
    more_C = _largest_without(one, load_1E, capacity, expert)
    domain_C = capacity.domains_R[rank_C]
    wanted = min(demands.min_domains, len(np.unique(domain_C)))
    out = []
    for copy, more in enumerate(more_C):
        if more > TOLERANCE:
            out.append(f"without it the fullest rank would carry {more:.1%} more")
        elif len(rank_C) <= demands.copies.min_copies:
            out.append(f"{demands.copies.min_copies} copies are asked for (minReplicas)")
        elif len(np.unique(np.delete(domain_C, copy))) < wanted:
            out.append(f"keeps copies in {wanted} domains (replicaSpread)")
        elif one.fractions_LRS[0, rank_C[copy], slot_C[copy]] == 0:
            out.append("stands by: serves nothing of this load")
        else:
            out.append("this load would balance as well without it")
    return out


def _largest_without(
    one: Placement, load_1E: LoadLE, capacity: Capacity, expert: int
) -> list[float]:
    """For each copy of the expert, by how much the fullest rank would be fuller without it (0.1 = a
    tenth), the others taking over as well as they can."""
    rank_C, slot_C = np.nonzero(one.slots_LRS[0] == expert)
    copies = np.arange(len(rank_C))
    slots_CRS = np.repeat(one.slots_LRS, len(copies), axis=0)
    slots_CRS[copies, rank_C, slot_C] = -1
    load_CE = np.repeat(load_1E, len(copies), axis=0)
    is_even = np.allclose(one.fractions_LRS, even_fractions(one.slots_LRS), atol=1e-4)

    def split_again(slots: SlotsLRS, load: LoadLE) -> FractionsLRS:
        if is_even:
            return even_fractions(slots)
        return split.best_fractions(load, slots, capacity.speeds_R)

    now = shortfall.largest(
        Placement(one.slots_LRS, split_again(one.slots_LRS, load_1E)), load_1E, capacity.speeds_R
    )
    loads_CR = score.rank_loads(slots_CRS, split_again(slots_CRS, load_CE), load_CE)
    largest_C = (loads_CR / capacity.speeds_R).max(axis=1)
    return (largest_C / now - 1).tolist() if now > 0 else [0.0] * len(copies)


def _sent(one: Placement, load_1E: LoadLE, capacity: Capacity, expert: int) -> Iterator[Sent]:
    if len(np.unique(capacity.domains_R)) < 2:
        return
    shares_D1RS = dispatch.source_shares(one.slots_LRS, one.fractions_LRS, capacity.domains_R)
    rank_C, slot_C = np.nonzero(one.slots_LRS[0] == expert)
    for domain, share in enumerate(dispatch.uniform_sources(capacity.domains_R).tolist()):
        shares_C = shares_D1RS[domain, 0, rank_C, slot_C]
        yield Sent(domain, share * float(load_1E[0, expert]), tuple(shares_C.tolist()))
