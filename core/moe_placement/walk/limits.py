"""What one wave may do: moves, bytes that a rank receives or gives, bytes over a border.

Neighbours: `waves` keeps to it, `sources` says who gives, `capacity` is where its ranks come from.

Shapes: L MoE layers, R ranks, S physical slots a rank, N arrivals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from moe_api.plan import SlotsLRS
from moe_placement.capacity import Capacity, DomainsR, FlagsR, SlotsR
from moe_placement.walk import sources
from moe_placement.walk.remaining import Copies, IndexN


class WalkError(ValueError):
    """A target that no walk may lead to, or limits that let nothing through."""


@dataclass(frozen=True, eq=False)
class Limits:
    """What one wave may do. Of every bound at least one weight must fit."""

    max_moves: int | None = None
    """Arrivals, all ranks and layers together."""
    bytes_per_expert: int = 1
    max_rank_bytes: int | None = None
    """That a rank receives, and that it gives."""
    max_link_bytes: int | None = None
    """From one domain to another."""
    live_R: FlagsR | None = None
    """Ranks that serve and can give; absent = all."""
    open_R: FlagsR | None = None
    """Live ranks that stay: only they receive; absent = all live ones."""
    slots_R: SlotsR | None = None
    """Physical slots of each rank, serving and spare; absent = the placement's width."""
    domains_R: DomainsR | None = None
    """Absent = all in one domain."""

    def __post_init__(self) -> None:
        for name in ("max_rank_bytes", "max_link_bytes"):
            value = getattr(self, name)
            if value is not None and value < self.bytes_per_expert:
                raise WalkError(
                    f"{name} is {value}: an expert has {self.bytes_per_expert} bytes and could "
                    "never move"
                )

    @classmethod
    def within(
        cls,
        capacity: Capacity,
        spare_slots: int,
        *,
        max_moves: int | None = None,
        bytes_per_expert: int = 1,
        max_rank_bytes: int | None = None,
        max_link_bytes: int | None = None,
    ) -> Self:
        """Limits for the ranks of a capacity, each with so many slots beside its serving ones."""
        return cls(
            max_moves, bytes_per_expert, max_rank_bytes, max_link_bytes,
            capacity.live_R, capacity.open_R, capacity.slots_R + spare_slots, capacity.domains_R,
        )  # fmt: skip


def fitting(here_LRS: SlotsLRS, coming: Copies, limits: Limits) -> IndexN:
    """Which of the arrivals may come, the first ones first.

    Args:
        here_LRS: placement in force without the copies on dead ranks.
        coming: most urgent first.
    """
    fits_N = np.arange(coming.number)[: limits.max_moves]
    if limits.max_rank_bytes is None and limits.max_link_bytes is None:
        return fits_N
    # Without some of them others may get another source, so that is looked at again.
    while not (light_N := _light(here_LRS, coming.where(fits_N), limits)).all():
        fits_N = fits_N[light_N]
    return fits_N


def _light(here_LRS: SlotsLRS, chosen: Copies, limits: Limits) -> npt.NDArray[np.bool_]:
    """Which arrivals keep every rank and every link within its bytes; the first one always does."""
    domains_R = limits.domains_R
    if domains_R is None:
        domains_R = np.zeros(here_LRS.shape[1], dtype=np.int64)
    nearness_RR = (domains_R[:, None] == domains_R[None, :]).astype(np.int64)
    offers = sources.offers(
        here_LRS, chosen.layer_N, chosen.rank_N, chosen.expert_N, nearness_RR, None
    )
    giver_N = offers.givers()
    has_N = giver_N >= 0
    keep_N = np.ones(chosen.number, dtype=np.bool_)
    if limits.max_rank_bytes is not None:
        most = limits.max_rank_bytes // limits.bytes_per_expert
        keep_N &= _turn(chosen.rank_N) < most
        keep_N[has_N] &= _turn(giver_N[has_N]) < most
    if limits.max_link_bytes is not None:
        most = limits.max_link_bytes // limits.bytes_per_expert
        from_N, to_N = domains_R[giver_N], domains_R[chosen.rank_N]
        crosses_N = np.flatnonzero(has_N & (from_N != to_N))
        link_N = from_N[crosses_N] * (1 + int(domains_R.max())) + to_N[crosses_N]
        keep_N[crosses_N] &= _turn(link_N) < most
    return keep_N


def _turn(number_N: IndexN) -> IndexN:
    """How many equal numbers stand before each."""
    order = np.argsort(number_N, kind="stable")
    ordered = number_N[order]
    out = np.empty(len(number_N), dtype=np.int64)
    out[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    return out
