"""Borders: which ranks are near each other, out of the topology domains that a plan's members name.

Members list their domains broad to narrow (`moe_api.plan.Member`); algorithms take one number a
rank. Operator and workers must come to the same numbers and shares, so both ask here. Neighbours:
`capacity` (takes the numbers), `dispatch` (whose tokens go where).

Shapes: L MoE layers, R ranks in plan order, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_api.plan import FractionsLRS
from moe_placement.capacity import DomainsR
from moe_placement.placement import Placement
from moe_placement.topology.dispatch import ShareD, SharesDLRS, shares_of, source_shares


def domains_at(domains: Sequence[Sequence[str]], level: int) -> DomainsR:
    """Number of each rank's domain at a level (0 = broadest), numbered in order of appearance.

    Domains of the same name in different broader domains are different ones. A level that a rank
    does not name counts as a domain without a name.
    """
    paths = [(*named, *[""] * (level + 1))[: level + 1] for named in domains]
    numbers = {path: number for number, path in enumerate(dict.fromkeys(paths))}
    return np.asarray([numbers[path] for path in paths], dtype=np.int64)


def near(domains: Sequence[Sequence[str]]) -> DomainsR:
    """Domains of the narrowest level that joins some ranks and parts others: the border that
    dispatch should rather not cross. Without such a level all ranks are in one domain."""
    num_levels = min((len(named) for named in domains), default=0)
    for level in reversed(range(num_levels)):
        domains_R = domains_at(domains, level)
        if 1 < domains_R.max() + 1 < len(domains_R):
            return domains_R
    return np.zeros(len(domains), dtype=np.int64)


def shares_from(
    domain: int, placement: Placement, near_R: DomainsR, sources: Sequence[int] | None
) -> FractionsLRS:
    """Share of an expert's tokens that ranks of a domain send to each copy, [L, R, S].

    Args:
        near_R: as `near` gives them.
        sources: `GroupPlan.sources`; absent = ranks of all domains send by the fractions.
    """
    source_D = _source_D(near_R, sources)
    if source_D is None:
        return placement.fractions_LRS
    return shares_of(domain, placement.slots_LRS, placement.fractions_LRS, near_R, source_D)


def all_shares(placement: Placement, near_R: DomainsR, sources: Sequence[int] | None) -> SharesDLRS:
    """`shares_from` every domain, [D, L, R, S]."""
    source_D = _source_D(near_R, sources)
    if source_D is None:
        alike = placement.fractions_LRS
        return np.broadcast_to(alike, (int(near_R.max()) + 1, *alike.shape))
    return source_shares(placement.slots_LRS, placement.fractions_LRS, near_R, source_D)


def _source_D(near_R: DomainsR, sources: Sequence[int] | None) -> ShareD | None:
    """How much comes from each domain; None where all send alike."""
    if sources is None or sum(sources) == 0 or not near_R.any():
        return None
    return np.bincount(near_R, weights=np.asarray(sources)).astype(np.float64)
