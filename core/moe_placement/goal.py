"""Goal: what is wanted of a plan, and what it may cost.

Neighbours: `planner` and `recipe` plan for one, `planned` is what comes of it, `policy` makes one
from what a user allows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moe_placement.copy_limits import CopyLimits


class Split(StrEnum):
    """How an expert's tokens are divided among its copies."""

    FRACTIONS = "fractions"
    EVEN = "even"


@dataclass(frozen=True)
class Goal:
    """What is wanted of a plan, and what it may cost."""

    split: Split = Split.FRACTIONS
    copies: CopyLimits = field(default_factory=CopyLimits)
    max_moves: int | None = None
    """Experts that ranks may receive on the way, all layers together; None = no limit. What a lost
    or leaving rank makes necessary is done beyond it."""
    aim: float = 0.03
    """A layer is left alone when its fullest rank is no further than this above the bound."""
    near: bool = False
    """Weigh traffic between domains: a little balance (`crossing.SLACK`) for fewer crossings."""
    num_groups: int | None = None
    """Of experts that the router chooses as a unit; `near` keeps a group's in one domain where it
    can. A new plan looks at it, single moves do not."""
    spread_domains: int = 1
    """Copies of an expert are wanted in so many domains, as far as there are copies and domains."""
