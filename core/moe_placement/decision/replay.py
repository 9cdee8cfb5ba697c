"""Replay: a recorded series of loads under a strategy, each window planned from earlier ones only.

Answers before anything is switched on what a policy would have moved, what it would have gained and
why it would have said no. Neighbours: `decide` (the policy), `planner` (what it is compared with),
`forecast`, `waves`; the command line reads the recordings and draws.

Shapes: W windows, L MoE layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from moe_placement import score
from moe_placement.bound import gap, lower_bound
from moe_placement.capacity import Capacity
from moe_placement.decision import trigger
from moe_placement.decision.decide import Policy, Walk, decide
from moe_placement.decision.forecast import Forecast
from moe_placement.decision.window import enough_tokens
from moe_placement.placement import Placement, received
from moe_placement.planned import Level
from moe_placement.planner import plan
from moe_placement.score import LoadLE, RankLoadsLR
from moe_placement.split import best_fractions
from moe_placement.walk import waves
from moe_placement.walk.waves import Limits

MAX_WAVES = 64
"""Of one window, however long it is."""


class Strategy(StrEnum):
    STATIC = "static"
    """The first plan stays."""
    FRACTIONS = "fractions"
    """Its copies stay, their fractions are solved again for every window."""
    FULL = "full"
    """A new plan for every window, whatever is in force."""
    STEPS = "steps"
    """The plan in force improved for every window, whatever it costs."""
    POLICY = "policy"
    """What the policy decides."""


@dataclass(frozen=True)
class Change:
    """What was done between two windows, and why."""

    reason: str
    message: str = ""
    level: Level = Level.KEPT
    moves: int = 0
    """Weights that ranks received, detours included."""
    waves: int = 0
    predicted: float | None = None
    """Imbalance in the next window by the forecast; None where none was known."""


@dataclass(frozen=True)
class WindowScore:
    """How well a placement that was made before a window served it."""

    number: int
    imbalance: float | None
    """Of the worst layer; None without tokens."""
    gap: float
    """Fullest rank over what no placement beats, minus 1: mean of the layers."""
    gap_solved: float
    """The same, had the fractions been solved for this very window."""
    change: Change
    """Made just before it."""


@dataclass(frozen=True)
class Replayed:
    strategy: Strategy
    windows: tuple[WindowScore, ...]
    num_weights: int
    """Serving slots of all ranks and layers."""
    bytes_per_expert: int

    @property
    def gap(self) -> float:
        return float(np.mean([window.gap for window in self.windows]))

    @property
    def gap_solved(self) -> float:
        return float(np.mean([window.gap_solved for window in self.windows]))

    @property
    def imbalance(self) -> float:
        """Mean over the windows that had tokens; 1 when none had."""
        known = [window.imbalance for window in self.windows if window.imbalance is not None]
        return float(np.mean(known)) if known else 1.0

    @property
    def moves(self) -> int:
        return sum(window.change.moves for window in self.windows)

    @property
    def bytes(self) -> int:
        return self.moves * self.bytes_per_expert

    @property
    def moved_share(self) -> float:
        """Weights moved per window, of all slots."""
        return self.moves / (self.num_weights * len(self.windows))

    @property
    def waves(self) -> int:
        return sum(window.change.waves for window in self.windows)


def replay(
    windows: Sequence[LoadLE],
    num_ranks: int,
    num_slots: int,
    policy: Policy,
    strategy: Strategy,
    *,
    window_seconds: float = 120.0,
    start: Placement | None = None,
) -> Replayed:
    """Go through the windows once.

    Args:
        windows: tokens per layer and expert [L, E], oldest first; two or more.
        num_slots: physical slots of a rank and layer: serving ones and spare ones.
        policy: the capacity and the goal of every strategy, and what `Strategy.POLICY` goes by.
        start: in force before the first window; None = a plan for the first window, which is then
        not scored.
    """
    capacity = policy.capacity(num_ranks, windows[0].shape[1], num_slots)
    actor = _Actor(strategy, capacity, policy, num_slots, window_seconds)
    current = start or actor.new(windows[0])
    change, scores, forecast = Change("Start"), [], None
    for number, load_LE in enumerate(windows):
        if number or start is not None:
            scores.append(_scored(number, load_LE, current, capacity, policy, change))
        forecast = (
            Forecast.begin(load_LE) if forecast is None else forecast.after(load_LE, 1.0, current)
        )
        expected_LE = forecast.shares_LE(steady=True) * load_LE.sum(axis=1, keepdims=True)
        current, change = actor.act(expected_LE, current, (number + 1) * window_seconds)
    num_weights = len(windows[0]) * capacity.room
    return Replayed(strategy, tuple(scores), num_weights, policy.bytes_per_expert)


class _Actor:
    """Makes the changes between two windows; remembers a policy's walk."""

    def __init__(
        self,
        strategy: Strategy,
        capacity: Capacity,
        policy: Policy,
        num_slots: int,
        window_seconds: float,
    ) -> None:
        self._strategy, self._capacity, self._policy = strategy, capacity, policy
        self._num_slots, self._window_seconds = num_slots, window_seconds
        self._walk = Walk()

    def act(
        self, load_LE: LoadLE, current: Placement, now_seconds: float
    ) -> tuple[Placement, Change]:
        """What is in force in the next window, for a load expected in it."""
        match self._strategy:
            case Strategy.STATIC:
                return current, Change("Static")
            case Strategy.POLICY:
                return self._decide(load_LE, current, now_seconds)
            case Strategy.FULL:
                placement, level = self.new(load_LE), Level.FULL
            case Strategy.FRACTIONS:
                placement, level = self._plan(load_LE, current, max_moves=0)
            case Strategy.STEPS:
                placement, level = self._plan(load_LE, current, max_moves=None)
        moves = received(current.slots_LRS, placement.slots_LRS)
        way = waves.walk(current.slots_LRS, placement.slots_LRS, self._limits)
        return placement, Change(
            "EveryWindow", "", level, moves, len(way), self._imbalance(placement, load_LE)
        )

    def new(self, load_LE: LoadLE) -> Placement:
        """A plan that knows of nothing in force, in placements as wide as the ranks' slots."""
        goal = self._policy.goal(None, self._capacity, load_LE.shape[1])
        planned = plan(load_LE, self._capacity, goal).placement
        more = ((0, 0), (0, 0), (0, self._num_slots - planned.slots_LRS.shape[2]))
        return Placement(
            np.pad(planned.slots_LRS, more, constant_values=-1), np.pad(planned.fractions_LRS, more)
        )

    def _plan(
        self, load_LE: LoadLE, current: Placement, max_moves: int | None
    ) -> tuple[Placement, Level]:
        goal = self._policy.goal(max_moves, self._capacity, load_LE.shape[1])
        planned = plan(load_LE, self._capacity, goal, current)
        return planned.placement, planned.level

    def _decide(
        self, load_LE: LoadLE, current: Placement, now_seconds: float
    ) -> tuple[Placement, Change]:
        """As many waves as the next window has time for."""
        known_LE = load_LE if enough_tokens(load_LE, self._capacity.num_ranks) else None
        until, num_waves, moves = now_seconds + self._window_seconds, 0, 0
        first = decision = decide(known_LE, current, self._walk, self._policy, now_seconds)
        while decision.wave is not None and num_waves < MAX_WAVES:
            arrived = received(current.slots_LRS, decision.wave.slots_LRS)
            current, num_waves, moves = decision.wave, num_waves + 1, moves + arrived
            now_seconds += self._wave_seconds(arrived)
            self._walk = decision.walk
            if self._walk.is_at(current):
                self._walk = self._walk.arrived(now_seconds)
                break
            if now_seconds >= until:
                break
            decision = decide(known_LE, current, self._walk, self._policy, now_seconds)
        else:
            self._walk = decision.walk
        predicted = None if known_LE is None else self._imbalance(current, load_LE)
        return current, Change(
            first.reason, first.message, first.level, moves, num_waves, predicted
        )

    def _wave_seconds(self, moves: int) -> float:
        """With the weights spread evenly over the ranks."""
        size = moves * self._policy.bytes_per_expert / self._capacity.num_ranks
        return trigger.WAVE_SECONDS + size / self._policy.max_bytes_per_second

    @property
    def _limits(self) -> Limits:
        return replace(self._policy.limits(self._capacity, self._num_slots), max_moves=None)

    def _imbalance(self, placement: Placement, load_LE: LoadLE) -> float | None:
        found = score.imbalance(_times(placement, load_LE, self._capacity))
        return None if found is None else found.worst


def _scored(
    number: int,
    load_LE: LoadLE,
    current: Placement,
    capacity: Capacity,
    policy: Policy,
    change: Change,
) -> WindowScore:
    most = policy.copies.max_copies
    bound_L = lower_bound(load_LE, capacity.slots_R, capacity.speeds_R, most)
    solved = Placement(
        current.slots_LRS, best_fractions(load_LE, current.slots_LRS, capacity.speeds_R)
    )
    found = score.imbalance(_times(current, load_LE, capacity))
    gaps = [
        float(gap(_loads(placement, load_LE), capacity.speeds_R, bound_L)[bound_L > 0].mean())
        if (bound_L > 0).any()
        else 0.0
        for placement in (current, solved)
    ]
    return WindowScore(number, None if found is None else found.worst, gaps[0], gaps[1], change)


def _loads(placement: Placement, load_LE: LoadLE) -> RankLoadsLR:
    return score.rank_loads(placement.slots_LRS, placement.fractions_LRS, load_LE)


def _times(placement: Placement, load_LE: LoadLE, capacity: Capacity) -> RankLoadsLR:
    return np.asarray(_loads(placement, load_LE) / capacity.speeds_R)
