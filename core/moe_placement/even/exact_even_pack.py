"""Packing: can these copies be placed so that no rank is above a level? Yes with places, no, or
stopped.

Ranks are filled one after another. A rank takes the most loaded copy left (where all ranks left are
alike) and any others that fit beside it; what it leaves unused must come out of the slack all ranks
have together, which is little near the optimum and cuts most branches. Copies of one expert are
alike, so what is left is told by a number for each expert, and no such rest is tried twice.
Neighbour: `exact_even`, which asks.

Shapes: E logical experts, R ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROUNDING = 1e-12

Rest = tuple[int, ...]
"""Copies of each expert that have no place yet."""


class Stopped(Exception):
    """The work allowed is done and the answer is not known."""


@dataclass(eq=False)
class Packing:
    share_E: Sequence[float]
    """Load of one copy of each expert."""
    slots_R: Sequence[int]
    speeds_R: Sequence[float]
    work: list[int]
    """Experts that may still be tried for a rank, shared with other packings: one number."""
    dead: set[tuple[int, Rest]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.order = sorted(range(len(self.share_E)), key=lambda e: (-self.share_E[e], e))
        kinds = list(zip(self.slots_R, self.speeds_R, strict=True))
        self.slots_left = [sum(self.slots_R[rank:]) for rank in range(len(kinds))]
        self.alike_left = [len(set(kinds[rank:])) == 1 for rank in range(len(kinds))]

    def places(self, counts_E: Rest, level: float) -> list[list[int]] | None:
        """Experts of each rank with no load ÷ speed above `level`, or None if there is no way.

        Raises:
            Stopped: the work allowed ran out.
        """
        self.dead.clear()
        level *= 1 + ROUNDING
        total = sum(share * count for share, count in zip(self.share_E, counts_E, strict=True))
        capacity = level * sum(self.speeds_R)
        if capacity < total:
            return None
        return self._fill(0, counts_E, level, capacity - total + capacity * ROUNDING)

    def _fill(self, rank: int, rest: Rest, level: float, slack: float) -> list[list[int]] | None:
        if rank == len(self.slots_R):
            return [] if not any(rest) else None
        left = len(self.slots_R) - rank
        if max(rest) > left or sum(rest) > self.slots_left[rank] or (rank, rest) in self.dead:
            return None
        room = level * self.speeds_R[rank]
        must = [expert for expert in range(len(rest)) if rest[expert] == left]
        for held in self._choices(rest, rank, room, slack):
            if must and any(expert not in held for expert in must):
                continue
            unused = room - sum(self.share_E[expert] for expert in held)
            others = tuple(n - (e in held) for e, n in enumerate(rest))
            found = self._fill(rank + 1, others, level, slack - unused)
            if found is not None:
                return [held, *found]
        self.dead.add((rank, rest))
        return None

    def _choices(self, rest: Rest, rank: int, room: float, slack: float) -> Iterator[list[int]]:
        """Experts for one rank that fit and leave no more unused than the slack.

        Raises:
            Stopped: the work allowed ran out.
        """
        slots = self.slots_R[rank]
        present = [expert for expert in self.order if rest[expert]]

        def extend(held: list[int], start: int, free: int, space: float) -> Iterator[list[int]]:
            for at in range(start, len(present) if free else start):
                expert = present[at]
                self.work[0] -= 1
                if self.work[0] < 0:
                    raise Stopped
                if self.share_E[expert] > space:
                    continue
                if space - free * self.share_E[expert] > slack:
                    break  # lighter experts leave even more unused
                yield from extend([*held, expert], at + 1, free - 1, space - self.share_E[expert])
            if space <= slack:
                yield held

        if self.alike_left[rank] and present and slots:
            first = present[0]
            if self.share_E[first] <= room:
                yield from extend([first], 1, slots - 1, room - self.share_E[first])
        else:
            yield from extend([], 0, slots, room)
