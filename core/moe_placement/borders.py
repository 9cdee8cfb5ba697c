"""Borders: which ranks are near each other, out of the topology domains that a plan's members name.

Members list their domains broad to narrow (`moe_api.plan.Member`); algorithms take one number a
rank. Operator and workers must come to the same numbers, so both ask here. Neighbours: `capacity`
(takes the numbers), `dispatch` (whose tokens go where).

Shapes: R ranks, in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moe_placement.capacity import DomainsR


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
