"""Topology: the ranks that a plan may use, and the domains whose borders cost.

Neighbours: `capacity` (all ranks, also those that a plan may not use), `localise`
(a plan that sees domains), `spread` (copies apart).

Shapes: R ranks, D domains, Q ranks of a domain (at most).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_placement.capacity import DomainsR, SlotsR, SpeedsR

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Topology:
    slots_R: SlotsR
    speeds_R: SpeedsR
    domains_R: DomainsR
    """Numbered from 0; a number may have no rank."""
    num_domains: int

    @property
    def num_ranks(self) -> int:
        return len(self.slots_R)

    @cached_property
    def ranks_D(self) -> Ints:
        """Ranks with a slot: the most copies of one expert in a domain."""
        return self.total(self.slots_R > 0).astype(np.int64)

    @cached_property
    def slots_D(self) -> Ints:
        return self.total(self.slots_R).astype(np.int64)

    @cached_property
    def speeds_D(self) -> Floats:
        """Of the ranks with a slot together."""
        return self.total(np.where(self.slots_R > 0, self.speeds_R, 0.0))

    @cached_property
    def members_DQ(self) -> Ints:
        """Ranks with a slot of each domain, −1 past the last."""
        members_D = [
            np.flatnonzero((self.domains_R == domain) & (self.slots_R > 0))
            for domain in range(self.num_domains)
        ]
        out = np.full((self.num_domains, int(self.ranks_D.max(initial=1))), -1, dtype=np.int64)
        for domain, members in enumerate(members_D):
            out[domain, : len(members)] = members
        return out

    def total(self, value_R: npt.NDArray[np.generic]) -> Floats:
        """Sum over the ranks of each domain, [D]."""
        return np.bincount(self.domains_R, value_R, self.num_domains).astype(np.float64)


def interleaved(domains_R: DomainsR) -> Ints:
    """The ranks in an order in which neighbours are in different domains as far as possible.

    A plan of `full_fractions` lets an expert's copies sit on neighbouring ranks; made for ranks in
    this order it spreads them at no cost, and leaves little to `spread`.
    """
    left_D = np.bincount(domains_R)
    used_D = np.full(len(left_D), -1)
    next_D = np.cumsum(left_D) - left_D
    by_domain_R = np.argsort(domains_R, kind="stable")
    out_R = np.empty_like(by_domain_R)
    for place in range(len(out_R)):
        # Most ranks left, but not the domain just used; then the one used longest ago.
        open_D = (left_D > 0) & ((used_D < place - 1) | (used_D < 0))
        if not open_D.any():
            open_D = left_D > 0
        domain = int(np.lexsort((used_D, np.where(open_D, -left_D, 1)))[0])
        out_R[place] = by_domain_R[next_D[domain]]
        left_D[domain] -= 1
        used_D[domain], next_D[domain] = place, next_D[domain] + 1
    return out_R
