"""Changes measured: load that drifts, the walk to a new plan, and the loss of a rank.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bench import placement_loads
from bench.figure import Choice, Tally, timed
from bench.full_rows import EVEN, FRACTIONS, capacity_of, checked, gap_of, published
from bench.placement_loads import LoadLE, SlotsLRS
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal
from moe_placement.placement import Placement
from moe_placement.planner import plan
from moe_placement.walk import membership, waves

SPARE_SLOTS = 1
DRIFTS = (0.1, 0.3)


def drift_fractions(choice: Choice) -> Iterator[Tally]:
    """Moves that keep every layer within 3 % when the load drifts, with fractions."""
    yield from _drift(choice, "drift", replace(FRACTIONS, aim=0.03), (0.01, 0.045))


def drift_even(choice: Choice) -> Iterator[Tally]:
    """Moves that keep every layer within 5 % when the load drifts, with an even split."""
    yield from _drift(choice, "drift-even", replace(EVEN, aim=0.05), (0.04, 0.12))


def _drift(choice: Choice, row: str, goal: Goal, max_moves: Sequence[float]) -> Iterator[Tally]:
    for key in choice.shapes:
        shape, capacity = choice.shape(key), capacity_of(choice.shape(key))
        tally = Tally(row, key)
        for kind in choice.loads:
            load = choice.load(key, kind)
            old = plan(load, capacity, goal).placement
            their_old = published(shape, load)
            for amount, moves_goal in zip(DRIFTS, max_moves, strict=True):
                then = placement_loads.drift(load, amount, drawn(key, kind, amount))
                planned, ms = timed(choice.repeats, plan, then, capacity, goal, old)
                new = checked(planned.placement, then)
                moves, their_moves = (
                    placement_loads.weights_received(before, after) / (len(load) * shape.slots)
                    for before, after in (
                        (old.slots_LRS, new.slots_LRS),
                        (their_old, published(shape, then)),
                    )
                )
                gap_L = gap_of(new, then)
                # What no plan of ours reaches is not asked of a few moves.
                allowed_L = np.maximum(goal.aim, gap_of(plan(then, capacity, goal).placement, then))
                which = f"±{amount:.0%}"
                tally.add(
                    kind, f"moves after {which}, of slots", "%", moves, their_moves, goal=moves_goal
                )
                tally.add(kind, f"  gap then, worst layer, {which}", "%", gap_L.max(), digits=2)
                tally.add(
                    kind, f"  gap over {goal.aim:.0%} or a full plan's, {which}", "%",
                    (gap_L - allowed_L).max(), goal=0.0, digits=2,
                )  # fmt: skip
                tally.add(kind, f"  time, {which}", "ms", ms, digits=0)
        yield tally


def drawn(*names: object) -> np.random.Generator:
    """A generator of its own for each case."""
    return np.random.default_rng([20252, *(zlib.crc32(str(name).encode()) for name in names)])


def transitions(choice: Choice) -> Iterator[Tally]:
    """Waves from one plan to the next: after a drift of ±30 % and to an unrelated load."""
    goal = replace(FRACTIONS, aim=0.03)
    for key in choice.shapes:
        shape, capacity = choice.shape(key), capacity_of(choice.shape(key))
        limits = waves.Limits.within(capacity, SPARE_SLOTS)
        tally = Tally("waves", key)
        for name in ("after ±30 %", "to an unrelated load"):
            counts, bad, their_counts = [], 0, []
            for kind in choice.loads:
                load = choice.load(key, kind)
                then = choice.load(key, kind, other=1)
                if name == "after ±30 %":
                    then = placement_loads.drift(load, 0.3, drawn(key, kind, 0.3))
                old = plan(load, capacity, goal).placement
                new = plan(then, capacity, goal, old).placement
                steps = waves.walk(old.slots_LRS, new.slots_LRS, limits)
                bad += broken_instants(old.slots_LRS, steps, shape.experts)
                counts.append(len(steps))
                theirs = [alone(published(shape, which)) for which in (load, then)]
                their_counts.append(len(waves.walk(*theirs, limits)))
            ours, published_mean = float(np.mean(counts)), float(np.mean(their_counts))
            tally.add("mean", f"waves {name}, mean", "", ours, published_mean, goal=8.0)
            tally.add("all", f"  broken instants, {name}", "", bad, goal=0.0, digits=0)
        yield tally


def broken_instants(start_LRS: SlotsLRS, steps: Sequence[SlotsLRS], num_experts: int) -> int:
    """Faults of a walk, counted without its own bookkeeping: an expert without a copy, a copy that
    comes from nowhere, two arrivals on a rank, an arrival in a slot that is in use."""
    found, before = 0, start_LRS
    for after in steps:
        width = max(before.shape[2], after.shape[2])
        before, after = _wide(before, width), _wide(after, width)
        found += len(placement_loads.faults(after, num_experts))
        arrives = (after >= 0) & (after != before)
        found += int((arrives.sum(axis=2) > 1).sum())
        found += int((before[arrives] >= 0).sum())
        held_LE = placement_loads.copy_counts(before, num_experts) > 0
        found += int((~held_LE[np.nonzero(arrives)[0], after[arrives]]).sum())
        before = after
    return found


def _wide(slots_LRS: SlotsLRS, width: int) -> SlotsLRS:
    more = width - slots_LRS.shape[2]
    return np.pad(slots_LRS, ((0, 0), (0, 0), (0, more)), constant_values=-1)


def alone(slots_LRS: SlotsLRS) -> SlotsLRS:
    """The published method may put an expert on a rank twice; a second slot counts as free."""
    ordered = np.sort(slots_LRS, axis=2)
    ordered[:, :, 1:][ordered[:, :, 1:] == ordered[:, :, :-1]] = -1
    return ordered.astype(np.int32)


def rank_lost(choice: Choice) -> Iterator[Tally]:
    """The repair plan's time and transfers, and balance within a tenth of the slots."""
    for key in choice.shapes:
        shape, capacity = choice.shape(key), capacity_of(choice.shape(key))
        tally, slots = Tally("rank-lost", key), shape.slots * shape.layers
        lost = shape.ranks // 2
        left = Capacity.of(shape.slots_per_rank, shape.ranks, dead=[lost])
        survivors = [rank for rank in range(shape.ranks) if rank != lost]
        goal = replace(FRACTIONS, aim=0.05, max_moves=slots // 10)
        for kind in choice.loads:
            load = choice.load(key, kind)
            old = plan(load, capacity, FRACTIONS).placement
            repaired, ms = timed(
                choice.repeats, membership.repair, old.slots_LRS, survivors, shape.experts
            )
            kept = old.slots_LRS[:, survivors]
            lost_experts = int((placement_loads.copy_counts(kept, shape.experts) == 0).sum())
            transfers = placement_loads.weights_received(kept, repaired)
            new = checked(plan(load, left, goal, old).placement, load)
            moves = placement_loads.weights_received(kept, new.slots_LRS[:, survivors])
            gap = gap_of(
                Placement(new.slots_LRS[:, survivors], new.fractions_LRS[:, survivors]), load
            )
            theirs = _published_after_loss(choice, key, load, lost)
            tally.add(kind, "time of the repair plan", "ms", ms, goal=10.0)
            tally.add(kind, "  transfers, of slots", "%", transfers / slots)
            over = float(transfers - lost_experts)
            tally.add(kind, "  transfers beyond the fewest", "", over, goal=0.0, digits=0)
            tally.add(
                kind, "moves to balance again, of slots", "%", moves / slots, theirs, goal=0.1
            )
            tally.add(kind, "  gap then, worst layer", "%", gap.max(), goal=0.05, digits=2)
        yield tally


def _published_after_loss(choice: Choice, key: str, load_LE: LoadLE, lost: int) -> float:
    """Share of slots that receive something when the published method plans again without a
    rank."""
    shape = choice.shape(key)
    fewer = replace(shape, slots=shape.slots - shape.slots_per_rank, ranks=shape.ranks - 1)
    kept = np.delete(published(shape, load_LE), lost, axis=1)
    moves = placement_loads.weights_received(kept, published(fewer, load_LE))
    return moves / (shape.slots * len(load_LE))
