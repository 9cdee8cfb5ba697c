"""Dispatch between domains: which copies serve the tokens of which domain, and what crosses.

A plan says which share of an expert's tokens each copy serves, not whose tokens. Served by whoever
is near, the same shares cost less traffic: each domain uses its own copies as far as they reach,
and what is left over goes where copies of other domains have room. That is the least that can
cross while the plan's shares hold, in closed form, so that every worker finds its part alone.
Neighbours: `crossing` (shares that cross less, when balance leaves a choice), `localise` (plans
that put copies where tokens come from).

Shapes: L layers, E logical experts, D domains (numbered from 0; one may have no rank), R ranks,
S physical slots a rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.capacity import DomainsR
from moe_placement.score import LoadLE

ShareD = npt.NDArray[np.float64]
LoadLED = npt.NDArray[np.float64]
ShareLED = npt.NDArray[np.float64]
SharesDLRS = npt.NDArray[np.float64]


def uniform_sources(domains_R: DomainsR, num_domains: int | None = None) -> ShareD:
    """Share of all tokens that comes from each domain when every rank has as many, [D]."""
    return np.bincount(domains_R, minlength=num_domains or 0) / len(domains_R)


def source_loads(load_LE: LoadLE, domains_R: DomainsR) -> LoadLED:
    """Loads by source domain [L, E, D] when every rank sends alike."""
    return np.asarray(load_LE[:, :, None] * uniform_sources(domains_R))


def source_shares(
    slots_LRS: SlotsLRS,
    fractions_LRS: FractionsLRS,
    domains_R: DomainsR,
    sources: ShareD | LoadLED | None = None,
) -> SharesDLRS:
    """For each source domain, the share of its tokens for an expert that each copy serves.

    Weighted by the sources, the shares of all domains add up to the plan's fractions.

    Args:
        sources: how many of the tokens come from each domain: [D], or for each expert [L, E, D]
            (shares or loads, only their proportions count); absent = every rank sends alike.

    Returns float64 [D, L, R, S]; an expert's copies sum to 1 for each domain, also for a domain
    that is to send nothing (as if it sent very little).
    """
    split = _Split(slots_LRS, fractions_LRS, domains_R, sources)
    return np.stack([split.of(domain) for domain in range(split.num_domains)])


def shares_of(
    domain: int,
    slots_LRS: SlotsLRS,
    fractions_LRS: FractionsLRS,
    domains_R: DomainsR,
    sources: ShareD | LoadLED | None = None,
) -> FractionsLRS:
    """`source_shares` of one domain alone, [L, R, S]: all that a rank of it needs."""
    return _Split(slots_LRS, fractions_LRS, domains_R, sources).of(domain)


def crossing_share(
    slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS, domains_R: DomainsR, load_LED: LoadLED
) -> npt.NDArray[np.float64]:
    """Share of each layer's assignments that leave their domain, [L], when tokens are dispatched
    by `source_shares` for these loads; 0 for a layer without load."""
    num_layers, num_experts, num_domains = load_LED.shape
    fractions_LED = domain_fractions(slots_LRS, fractions_LRS, domains_R, num_experts, num_domains)
    total_LE = load_LED.sum(axis=2)
    near_LED = np.minimum(load_LED, fractions_LED * total_LE[:, :, None])
    total_L = total_LE.sum(axis=1)
    crossing_L = total_L - near_LED.reshape(num_layers, -1).sum(axis=1)
    share_L = crossing_L / np.where(total_L > 0, total_L, 1.0)
    return np.asarray(np.clip(share_L, 0.0, 1.0))


def domain_fractions(
    slots_LRS: SlotsLRS,
    fractions_LRS: FractionsLRS,
    domains_R: DomainsR,
    num_experts: int,
    num_domains: int,
) -> ShareLED:
    """Share of each expert's tokens that the copies of a domain serve together, [L, E, D]."""
    layers_N, ranks_N, slots_N = np.nonzero(slots_LRS >= 0)
    expert_N = slots_LRS[layers_N, ranks_N, slots_N].astype(np.int64)
    key_N = (layers_N * num_experts + expert_N) * num_domains + domains_R[ranks_N]
    dims = (slots_LRS.shape[0], num_experts, num_domains)
    sums = np.bincount(key_N, fractions_LRS[layers_N, ranks_N, slots_N], int(np.prod(dims)))
    return np.asarray(sums.reshape(dims))


class _Split:
    """The transport from domains to domains of one plan: own first, then deficits to surpluses."""

    def __init__(
        self,
        slots_LRS: SlotsLRS,
        fractions_LRS: FractionsLRS,
        domains_R: DomainsR,
        sources: ShareD | LoadLED | None,
    ) -> None:
        self._slots_LRS, self._fractions_LRS = slots_LRS, fractions_LRS
        self._domains_R = domains_R
        if sources is None:
            sources = uniform_sources(domains_R)
        num_experts = int(slots_LRS.max(initial=0)) + 1
        self.num_domains = sources.shape[-1]
        self._there_LED = domain_fractions(
            slots_LRS, fractions_LRS, domains_R, num_experts, self.num_domains
        )
        self._sent_LED = _shares(sources, num_experts, self._there_LED)
        surplus_LED = np.maximum(self._there_LED - self._sent_LED, 0.0)
        surplus_LE1 = surplus_LED.sum(axis=2, keepdims=True)
        self._abroad_LED = np.where(
            surplus_LE1 > 0, surplus_LED / np.where(surplus_LE1 > 0, surplus_LE1, 1.0),
            self._there_LED,
        )  # fmt: skip

    def of(self, domain: int) -> FractionsLRS:
        sent_LE, there_LE = self._sent_LED[..., domain], self._there_LED[..., domain]
        reach_LE = np.minimum(there_LE / np.where(sent_LE > 0, sent_LE, 1.0), 1.0)
        own_LE = np.where(sent_LE > 0, reach_LE, there_LE > 0)
        share_LED = (1.0 - own_LE)[:, :, None] * self._abroad_LED
        share_LED[..., domain] += own_LE
        # From what a domain serves to what each of its copies serves, in proportion.
        there_LED = self._there_LED
        part_LED = share_LED / np.where(there_LED > 0, there_LED, 1.0)
        layers_L11 = np.arange(len(self._slots_LRS))[:, None, None]
        domains_1R1 = self._domains_R[None, :, None]
        part_LRS = part_LED[layers_L11, np.maximum(self._slots_LRS, 0), domains_1R1]
        return np.where(self._slots_LRS >= 0, part_LRS * self._fractions_LRS, 0.0)


def _shares(sources: ShareD | LoadLED, num_experts: int, there_LED: ShareLED) -> ShareLED:
    """Sources as shares that sum to 1 per expert; an expert nobody asks for crosses nowhere."""
    if sources.ndim == 1:
        return np.broadcast_to(sources / sources.sum(), there_LED.shape)
    sources = sources[:, :num_experts]
    total_LE1 = sources.sum(axis=2, keepdims=True)
    return np.where(total_LE1 > 0, sources / np.where(total_LE1 > 0, total_LE1, 1.0), there_LED)
