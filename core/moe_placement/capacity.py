"""What the ranks of a group can take: slots, speeds, who is alive, who leaves, who is near whom.

Every planning function takes a `Capacity`; nothing in it needs to divide evenly or to be alike.
Neighbours: `placement` (what is where), `planner` (the recipe), `bound` (what no plan can beat).

Shapes: R ranks, in plan order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

SlotsR = npt.NDArray[np.int64]
SpeedsR = npt.NDArray[np.float64]
FlagsR = npt.NDArray[np.bool_]
DomainsR = npt.NDArray[np.int64]

MAX_RANKS = 4096


class CapacityError(ValueError):
    """Ranks that cannot be planned for; the message names the rank and the value."""


@dataclass(frozen=True, eq=False)
class Capacity:
    slots_R: SlotsR
    """Serving slots of each rank in a layer: as many experts it may hold when nothing moves."""
    speeds_R: SpeedsR
    """1 = normal; a rank at 0.7 should get 0.7 of the tokens."""
    live_R: FlagsR
    """Serves, and can give its weights to others."""
    open_R: FlagsR
    """Live and staying: a target may name it. A live rank that is not open is draining."""
    domains_R: DomainsR
    """Number of the domain (host, rack) whose border costs."""

    @classmethod
    def of(
        cls,
        slots: int | Sequence[int],
        num_ranks: int | None = None,
        *,
        speeds: Sequence[float] | npt.NDArray[np.float64] | None = None,
        dead: Sequence[int] = (),
        draining: Sequence[int] = (),
        domains: Sequence[int] | None = None,
    ) -> Self:
        """Capacity of `num_ranks` ranks with `slots` each, or of one rank for each entry of
        `slots`.

        Args:
            dead, draining: ranks by number.
            domains: one number a rank; absent = all in one domain.

        Raises:
            CapacityError: a size that does not fit the others, a rank that does not exist, a speed
            that is no positive number, or no rank left to plan for.
        """
        if num_ranks is None:
            num_ranks = 1 if isinstance(slots, int) else len(slots)
        if not 1 <= num_ranks <= MAX_RANKS:
            raise CapacityError(f"{num_ranks} ranks: must be 1 to {MAX_RANKS}")
        per_rank = [slots] * num_ranks if isinstance(slots, int) else list(slots)
        out = cls(
            slots_R=np.asarray(_sized("slots", per_rank, num_ranks), dtype=np.int64),
            speeds_R=np.asarray(
                _sized("speeds", [1.0] * num_ranks if speeds is None else speeds, num_ranks),
                dtype=np.float64,
            ),
            live_R=_without(np.ones(num_ranks, dtype=np.bool_), "dead", dead),
            open_R=_without(np.ones(num_ranks, dtype=np.bool_), "draining", draining),
            domains_R=np.asarray(
                _sized("domains", [0] * num_ranks if domains is None else domains, num_ranks),
                dtype=np.int64,
            ),
        )
        out = replace(out, open_R=out.open_R & out.live_R)
        if (out.slots_R < 0).any():
            rank = int(np.argmax(out.slots_R < 0))
            raise CapacityError(f"rank {rank} has {out.slots_R[rank]} slots: must be 0 or more")
        bad = ~(np.isfinite(out.speeds_R) & (out.speeds_R > 0))
        if bad.any():
            rank = int(np.argmax(bad))
            raise CapacityError(
                f"rank {rank} has speed {out.speeds_R[rank]:g}: must be a positive number"
            )
        if not out.open_R.any():
            raise CapacityError("no rank is left to plan for: all are dead or draining")
        return out

    @property
    def num_ranks(self) -> int:
        return len(self.slots_R)

    @property
    def room(self) -> int:
        """Serving slots of a layer on all open ranks together."""
        return int(self.slots_R[self.open_R].sum())

    def only(self, ranks_R: FlagsR) -> Capacity:
        """The same for some of the ranks."""
        return Capacity(
            self.slots_R[ranks_R],
            self.speeds_R[ranks_R],
            self.live_R[ranks_R],
            self.open_R[ranks_R],
            self.domains_R[ranks_R],
        )


def _sized(
    what: str, values: Sequence[float] | npt.NDArray[np.float64], num_ranks: int
) -> Sequence[float] | npt.NDArray[np.float64]:
    if len(values) != num_ranks:
        raise CapacityError(f"{len(values)} {what} for {num_ranks} ranks: give one for each rank")
    return values


def _without(flags_R: FlagsR, what: str, ranks: Sequence[int]) -> FlagsR:
    for rank in ranks:
        if not 0 <= rank < len(flags_R):
            raise CapacityError(
                f"{what} rank {rank} does not exist: ranks are 0 to {len(flags_R) - 1}"
            )
        flags_R[rank] = False
    return flags_R
