"""Shortfall: why a layer's largest rank load is above the fair share, and above the bound.

Sentences for `explain`, each found from the placement and the load alone. Neighbours: `bound` (what
no placement can beat), `split` (what no fractions of a given placement can beat).

Shapes: E logical experts, R ranks, S physical slots a rank; 1 = a single layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moe_placement import bound, score, split
from moe_placement.capacity import Capacity, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.placement import Placement
from moe_placement.score import LoadLE
from moe_placement.topology import dispatch

TOLERANCE = 1e-4
"""Differences below it are not worth a sentence."""
MAX_NAMED = 8
"""Ranks or experts named in a sentence."""


@dataclass(frozen=True)
class Demands:
    """What was asked of a plan beside balance."""

    copies: CopyLimits = field(default_factory=CopyLimits)
    min_domains: int = 1
    """Domains wanted for the copies of an expert that has as many."""


@dataclass(frozen=True)
class Bottleneck:
    """Ranks that no split of a placement relieves."""

    ranks: tuple[int, ...]
    experts: tuple[int, ...]
    """Those with tokens whose copies are all on these ranks."""
    level: float
    """Their tokens ÷ speed of the ranks: the largest load ÷ speed is not below it."""


def largest(one: Placement, load_1E: LoadLE, speeds_R: SpeedsR) -> float:
    """Load ÷ speed of the fullest rank of a single layer."""
    return float((score.rank_loads(one.slots_LRS, one.fractions_LRS, load_1E) / speeds_R).max())


def above_fair(
    load_E: npt.NDArray[np.float64], capacity: Capacity, demands: Demands, fair: float, level: float
) -> Iterator[str]:
    """Why the bound of a layer, `level`, is above the fair share of a rank.

    Args:
        capacity: of open ranks only.
    """
    if level <= fair * (1 + TOLERANCE):
        return
    most = demands.copies.most(capacity.num_ranks)
    hottest = int(load_E.argmax())
    fastest = float(np.sort(capacity.speeds_R)[::-1][:most].sum())
    wanted = sum(copies_needed(float(tokens), fair, capacity.speeds_R) for tokens in load_E)
    if load_E[hottest] / fastest >= level * (1 - TOLERANCE):
        yield (
            f"expert {hottest} has {load_E[hottest] / load_E.sum():.1%} of the tokens: on {most} "
            f"{_plural('rank', most)}, as many as it may be on, each carries {level:,.0f}"
        )
    elif capacity.room == len(load_E):
        yield "as many slots as experts: each has one copy, and nothing can be split"
    elif wanted > capacity.room:
        yield (
            f"with no rank above the fair share the experts need {wanted} slots, "
            f"there are {capacity.room}"
        )
    else:
        yield "some ranks have too few slots to get their share of the tokens"


def above_bound(one: Placement, load_1E: LoadLE, capacity: Capacity, level: float) -> Iterator[str]:
    """Why a placement of a single layer is above the bound, `level`."""
    speeds_R = capacity.speeds_R
    now = largest(one, load_1E, speeds_R)
    if now <= level * (1 + TOLERANCE):
        return
    best = Placement(one.slots_LRS, split.best_fractions(load_1E, one.slots_LRS, speeds_R))
    reached = largest(best, load_1E, speeds_R)
    if now > reached * (1 + TOLERANCE):
        yield (
            f"other fractions alone, without a move, would bring the fullest rank from {now:,.0f} "
            f"to {reached:,.0f}" + _for_nearness(one, best, load_1E, capacity)
        )
    if reached > level * (1 + TOLERANCE):
        found = bottleneck(best, load_1E, speeds_R)
        holds = "holds" if len(found.ranks) == 1 else "hold"
        yield (
            f"{_named('rank', found.ranks)} {holds} all copies of {len(found.experts)} "
            f"{_plural('expert', len(found.experts))}, {found.level:,.0f} tokens a rank: no split "
            "gets below that, only moves do"
        )


def crossing(one: Placement, load_1E: LoadLE, capacity: Capacity) -> float | None:
    """Share of a single layer's assignments that leave their domain if all ranks send alike; None
    in one domain."""
    if len(np.unique(capacity.domains_R)) < 2:
        return None
    sources_1ED = dispatch.source_loads(load_1E, capacity.domains_R)
    crossing_1 = dispatch.crossing_share(
        one.slots_LRS, one.fractions_LRS, capacity.domains_R, sources_1ED
    )
    return float(crossing_1[0])


def held_back(load_1E: LoadLE, capacity: Capacity, demands: Demands, level: float) -> Iterator[str]:
    """What the limits of copies cost a single layer with the bound `level`."""
    copies = demands.copies
    free = float(bound.lower_bound(load_1E, capacity.slots_R, capacity.speeds_R)[0])
    if level > free * (1 + TOLERANCE):
        limits = f"from {copies.min_copies} to {copies.most(capacity.num_ranks)}"
        yield (
            f"each expert has {limits} copies, as asked: with free choice the bound would be "
            f"{free:,.0f} instead of {level:,.0f}"
        )


def not_spread(one: Placement, capacity: Capacity, demands: Demands) -> Iterator[str]:
    """Experts whose copies are in fewer domains than asked."""
    wanted = min(demands.min_domains, len(np.unique(capacity.domains_R[capacity.open_R])))
    short = []
    for expert in np.unique(one.slots_LRS[one.slots_LRS >= 0]).tolist() if wanted > 1 else ():
        rank_C = np.nonzero(one.slots_LRS[0] == expert)[0]
        if len(np.unique(capacity.domains_R[rank_C])) < min(wanted, len(rank_C)):
            short.append(expert)
    if short:
        yield f"the copies of {_named('expert', short)} are in fewer than {wanted} domains"


def copies_needed(tokens: float, level: float, speeds_R: SpeedsR) -> int:
    """Copies an expert needs if no rank is to carry more than level × speed, at least one."""
    if tokens <= 0 or level <= 0:
        return 1
    fastest_R = np.cumsum(np.sort(speeds_R)[::-1])
    return int(np.searchsorted(fastest_R, tokens / level * (1 - 1e-9), side="left")) + 1


def bottleneck(one: Placement, load_1E: LoadLE, speeds_R: SpeedsR) -> Bottleneck:
    """Ranks that no split of this placement of a single layer relieves.

    Found among the ranks from the fullest down: with the best fractions the level equals the
    largest load ÷ speed, which proves that only another placement gets below it.
    """
    level_R = score.rank_loads(one.slots_LRS, one.fractions_LRS, load_1E)[0] / speeds_R
    order_R = np.argsort(-level_R, kind="stable")
    place_R = np.empty_like(order_R)
    place_R[order_R] = np.arange(len(order_R))
    last_E = np.full(load_1E.shape[1], -1)
    rank_N, slot_N = np.nonzero(one.slots_LRS[0] >= 0)
    np.maximum.at(last_E, one.slots_LRS[0, rank_N, slot_N], place_R[rank_N])
    held_E = last_E >= 0
    load_R = np.bincount(last_E[held_E], load_1E[0, held_E], len(order_R))
    value_R = np.cumsum(load_R) / np.cumsum(speeds_R[order_R])
    size = int(value_R.argmax()) + 1
    experts = np.flatnonzero(held_E & (last_E < size) & (load_1E[0] > 0))
    return Bottleneck(
        ranks=tuple(sorted(order_R[:size].tolist())),
        experts=tuple(experts.tolist()),
        level=float(value_R[size - 1]),
    )


def _for_nearness(one: Placement, best: Placement, load_1E: LoadLE, capacity: Capacity) -> str:
    """What better balance would cost in traffic between domains."""
    now, then = (crossing(placement, load_1E, capacity) for placement in (one, best))
    if now is None or then is None or then <= now + TOLERANCE:
        return ""
    return f", and let {then:.1%} instead of {now:.1%} of the tokens leave their domain"


def _named(what: str, numbers: Sequence[int]) -> str:
    """`ranks 3, 8 and 12`, or how many there are."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    if len(numbers) > MAX_NAMED:
        return f"{len(numbers)} {what}s"
    *first, last = map(str, numbers)
    return f"{what}s {', '.join(first)} and {last}"


def _plural(stem: str, count: int, one: str = "", many: str = "s") -> str:
    return stem + (one if count == 1 else many)
