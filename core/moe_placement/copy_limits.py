"""Copy limits: how many copies an expert must have, and may have.

More copies than balance asks for survive the loss of a rank; fewer keep the weights that an engine
reads per step, and the moves, down. Neighbours: the planners (`full_fractions`, `full_even`,
`step_fractions`, `step_even`) keep to them, `planner` checks them at the door.

Shapes: R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from moe_placement.capacity import SlotsR


class CopyLimitsError(ValueError):
    """Limits that contradict each other or cannot be met; the message says which and the way
    out."""


@dataclass(frozen=True)
class CopyLimits:
    """Copies of an expert sit on different ranks, so no expert has more copies than ranks."""

    min_copies: int = 1
    max_copies: int | None = None
    """None = as many as there are ranks."""

    def __post_init__(self) -> None:
        if self.min_copies < 1:
            raise CopyLimitsError(
                f"min_copies is {self.min_copies}: every expert needs a copy, give 1 or more"
            )
        if self.max_copies is not None and self.max_copies < self.min_copies:
            raise CopyLimitsError(
                f"max_copies is {self.max_copies}, min_copies {self.min_copies}: "
                "raise max_copies or lower min_copies"
            )

    def most(self, num_ranks: int) -> int:
        """The most copies an expert may have on so many ranks."""
        return num_ranks if self.max_copies is None else min(self.max_copies, num_ranks)

    def check(self, num_experts: int, slots_R: SlotsR) -> None:
        """
        Raises:
            CopyLimitsError: the slots cannot hold min_copies of each expert on different ranks.
        """
        most = most_alike(num_experts, slots_R)
        if most < self.min_copies:
            raise CopyLimitsError(
                f"min_copies is {self.min_copies}, but {int(slots_R.sum())} slots on "
                f"{len(slots_R)} ranks hold at most {most} copies of each of {num_experts} "
                "experts on different ranks: lower min_copies or add slots or ranks"
            )

    def within_reach(self, num_experts: int, slots_R: SlotsR) -> Self:
        """The same, with min_copies lowered to what the slots can hold (never below 1)."""
        most = max(1, most_alike(num_experts, slots_R))
        return self if self.min_copies <= most else replace(self, min_copies=most)


def most_alike(num_experts: int, slots_R: SlotsR) -> int:
    """The largest n for which n copies of every expert fit, all copies of one on different ranks.

    A rank holds at most one copy of each expert, so it offers min(slots, experts). By Gale and
    Ryser n fits if any k experts find k·n places, Σ min(slots, k) ≥ k·n; the sum is concave in k
    and 0 at 0, so all experts together are the only case to look at.
    """
    return int(np.minimum(slots_R, num_experts).sum()) // num_experts
