"""One figure of the planner's table, measured under several loads, beside the published method."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from bench import placement_loads
from bench.placement_loads import LoadLE, Shape

T = TypeVar("T")
P = ParamSpec("P")
SCALES = {"%": 100.0, "ms": 1.0, "": 1.0}


@dataclass(frozen=True)
class Figure:
    """A number per case (a load, mostly); the table shows the worst, the JSON file all of them.

    Shares are kept as shares (0.01) and shown in %; less is better, always.
    """

    row: str
    shape: str
    name: str
    unit: str
    cases: tuple[str, ...]
    ours: tuple[float, ...]
    published: tuple[float, ...] = ()
    """The same of the published method; empty where it has no such thing."""
    goal: float | None = None
    digits: int = 1
    bounds: tuple[float, ...] = ()
    """What no method can be below, where that is known; a goal below it cannot be reached."""

    @property
    def reached(self) -> bool | None:
        """None where nothing was promised."""
        return None if self.goal is None else not self.missed

    @property
    def missed(self) -> list[str]:
        """Cases in which the goal was not reached although it can be."""
        return [
            case
            for case, value, bound in zip(self.cases, self.ours, self._bounds, strict=True)
            if self.goal is not None and self._shown(value) > self._shown(max(self.goal, bound))
        ]

    @property
    def out_of_reach(self) -> list[str]:
        """Cases in which no method reaches the goal."""
        return [
            case
            for case, bound in zip(self.cases, self._bounds, strict=True)
            if self.goal is not None and self._shown(bound) > self._shown(self.goal)
        ]

    @property
    def _bounds(self) -> tuple[float, ...]:
        return self.bounds or (-math.inf,) * len(self.ours)

    def _shown(self, value: float) -> float:
        """As it stands in the table: what is shown as the goal has reached it."""
        return value if math.isinf(value) else round(value * SCALES[self.unit], self.digits)

    def shown(self, values: Sequence[float]) -> str:
        """`0.2 … 1.3 %`: best and worst case."""
        if not values:
            return "–"
        scale = SCALES[self.unit]
        low, high = (f"{f(values) * scale:.{self.digits}f}" for f in (min, max))
        return f"{high if low == high else f'{low} … {high}'} {self.unit}".strip()

    def shown_goal(self) -> str:
        if self.goal is None:
            return "–"
        return f"≤ {round(self.goal * SCALES[self.unit], 3):g} {self.unit}".strip()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "reached": self.reached, "out_of_reach": self.out_of_reach}


@dataclass(frozen=True)
class Choice:
    """What to measure."""

    shapes: tuple[str, ...] = tuple(placement_loads.SHAPES)
    loads: tuple[str, ...] = placement_loads.LOADS
    max_layers: int | None = None
    repeats: int = 3
    salt: int = 0
    """Not 0: loads other than those that the goals were set with."""

    def shape(self, key: str) -> Shape:
        return placement_loads.SHAPES[key]

    def only(self, shapes: tuple[str, ...], loads: tuple[str, ...]) -> Choice:
        return replace(self, shapes=shapes, loads=loads)

    def load(self, key: str, kind: str, other: int = 0) -> LoadLE:
        """`other`: unrelated loads of the same kind have other numbers."""
        return placement_loads.make_load(key, kind, self.salt + other)[: self.max_layers]


@dataclass
class Tally:
    """Figures of one row and shape while they are measured, load by load."""

    row: str
    shape: str
    figures: dict[str, Figure] = field(default_factory=dict)

    def add(
        self,
        case: str,
        name: str,
        unit: str,
        ours: float,
        published: float | None = None,
        *,
        goal: float | None = None,
        digits: int = 1,
        bound: float | None = None,
    ) -> None:
        """`goal` and `digits` are the same for all cases of a name."""
        theirs, floor = (() if x is None else (float(x),) for x in (published, bound))
        new = Figure(
            self.row, self.shape, name, unit, (case,), (float(ours),), theirs, goal, digits, floor
        )
        old = self.figures.get(name)
        if old is not None:
            new = replace(
                new,
                cases=old.cases + new.cases,
                ours=old.ours + new.ours,
                published=old.published + new.published,
                bounds=old.bounds + new.bounds,
            )
        self.figures[name] = new


def timed(repeats: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> tuple[T, float]:
    """What `work` returns and the CPU milliseconds of its fastest run: other programs on the
    machine disturb those least."""
    milliseconds = []
    for _ in range(repeats):
        begun = time.process_time()
        out = work(*args, **kwargs)
        milliseconds.append((time.process_time() - begun) * 1e3)
    return out, min(milliseconds)
