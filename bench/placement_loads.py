"""Seeded loads in the shape of known models, what no plan can beat, and a judge of finished plans.

Nothing here knows the product: a planner is judged by the arrays it returns, so that a mistake in
its own bookkeeping cannot hide itself. Neighbours: `placement` measures with it,
`greedy_hierarchical` is what others do; the tests of the planner take their loads from here.

Shapes: L layers, E logical experts, R ranks, S slots a rank.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LoadLE = npt.NDArray[np.float64]
SlotsLRS = npt.NDArray[np.integer]
FractionsLRS = npt.NDArray[np.float64]

TOKENS_PER_LAYER = 1e6
SUM_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Shape:
    """A model on a cluster; `slots` counts a layer's slots over all ranks."""

    name: str
    layers: int
    experts: int
    slots: int
    ranks: int
    nodes: int
    expert_groups: int = 1

    @property
    def slots_per_rank(self) -> int:
        return self.slots // self.ranks


SHAPES = {
    "a": Shape("Mixtral-8x7B like", 32, 8, 16, 8, 1),
    "b": Shape("Qwen3-235B like", 94, 128, 160, 32, 4),
    "c1": Shape("DeepSeek-V3 like, 32 ranks", 58, 256, 288, 32, 4, 8),
    "c2": Shape("DeepSeek-V3 like, 64 ranks", 58, 256, 320, 64, 8, 8),
    "c3": Shape("DeepSeek-V3 like, 72 ranks, 2.25 slots per expert", 58, 256, 576, 72, 18, 8),
    "d": Shape("Kimi-K2 like", 60, 384, 480, 96, 12),
    "e": Shape("stress: 1024 experts on 1024 ranks", 61, 1024, 2048, 1024, 128),
}
LOADS = ("zipf0.6", "zipf1.0", "zipf1.4", "lognorm1.0", "hotdomain")


def make_load(shape_key: str, kind: str, salt: int = 0) -> LoadLE:
    """Token counts [L, E], one million assignments a layer, hot experts drawn anew per layer.

    Raises:
        ValueError: an unknown kind of load.
    """
    shape = SHAPES[shape_key]
    seed = [20251, zlib.crc32(shape_key.encode()), zlib.crc32(kind.encode()), salt]
    return draw_load(shape.layers, shape.experts, kind, np.random.default_rng(seed))


def draw_load(num_layers: int, num_experts: int, kind: str, rng: np.random.Generator) -> LoadLE:
    """The same for any shape and generator."""
    dims = (num_layers, num_experts)
    if kind.startswith("zipf"):
        popularity_E = np.arange(1, num_experts + 1) ** -float(kind[4:])
        load = np.stack([rng.permutation(popularity_E) for _ in range(num_layers)])
        load = load * rng.lognormal(0, 0.1, dims)
    elif kind.startswith("lognorm"):
        load = rng.lognormal(0, float(kind[7:]), dims)
    elif kind == "hotdomain":  # one contiguous eighth of the experts is six times hotter
        load = rng.lognormal(0, 0.5, dims)
        width = max(1, num_experts // 8)
        for layer in range(num_layers):
            start = width * int(rng.integers(0, num_experts // width))
            load[layer, start : start + width] *= 6
    else:
        raise ValueError(f"unknown load kind {kind!r}; known: {LOADS}")
    return np.asarray(load / load.sum(axis=1, keepdims=True) * TOKENS_PER_LAYER)


def drift(load_LE: LoadLE, amount: float, rng: np.random.Generator) -> LoadLE:
    """Each expert's load times U(1 − amount, 1 + amount), renormalised per layer."""
    moved = load_LE * rng.uniform(1 - amount, 1 + amount, load_LE.shape)
    return np.asarray(moved / moved.sum(axis=1, keepdims=True) * load_LE.sum(axis=1, keepdims=True))


def lower_bound(
    load_LE: LoadLE,
    slots: int,
    ranks: int,
    speeds_R: npt.NDArray[np.float64] | None = None,
    iterations: int = 80,
) -> npt.NDArray[np.float64]:
    """[L]: no placement has a smaller largest rank load, with even or uneven splits; 0 = no load.

    max(mean rank load, water level): for no rank to carry more than x of it, an expert of load w
    needs ceil(w / x) copies on distinct ranks (one even when idle), and all must fit into `slots`.
    With `speeds_R` (one per live rank, 1 = normal; load then means load / speed) only total / sum
    of speeds and each expert's load / sum of speeds count: a bound, not always a tight one.

    Raises:
        ValueError: fewer slots than experts.
    """
    total_L = load_LE.sum(axis=1)
    if speeds_R is not None:
        return np.asarray(np.maximum(total_L, load_LE.max(axis=1)) / speeds_R.sum())
    if slots < load_LE.shape[1]:
        raise ValueError(f"{slots} slots cannot hold {load_LE.shape[1]} experts")
    low = np.maximum(total_L / slots * 0.5, load_LE.max(axis=1) / ranks)
    high = np.maximum(load_LE.max(axis=1) * (1 + 1e-12), 1e-300)
    for _ in range(iterations):
        middle = np.maximum((low + high) / 2, 1e-300)
        copies_LE = np.maximum(np.ceil(load_LE / middle[:, None] - 1e-12), 1)
        fits = (copies_LE.sum(axis=1) <= slots) & (copies_LE.max(axis=1) <= ranks)
        high = np.where(fits, middle, high)
        low = np.where(fits, low, middle)
    return np.where(total_L > 0, np.maximum(high, total_L / ranks), 0.0)


def copy_counts(slots_LRS: SlotsLRS, num_experts: int) -> npt.NDArray[np.int64]:
    """How many slots hold each expert, [L, E]."""
    num_layers = slots_LRS.shape[0]
    flat = slots_LRS.reshape(num_layers, -1).astype(np.int64)
    key = (np.arange(num_layers)[:, None] * num_experts + flat)[flat >= 0]
    return np.bincount(key, minlength=num_layers * num_experts).reshape(num_layers, num_experts)


def even_fractions(slots_LRS: SlotsLRS, num_experts: int) -> FractionsLRS:
    """1 / (copies of the slot's expert), 0 in free slots."""
    copies_LE = np.maximum(copy_counts(slots_LRS, num_experts), 1)
    return np.where(slots_LRS >= 0, 1.0 / _at(copies_LE, slots_LRS), 0.0)


def rank_load(
    slots_LRS: SlotsLRS, load_LE: LoadLE, fractions_LRS: FractionsLRS | None = None
) -> npt.NDArray[np.float64]:
    """Tokens each rank computes, [L, R]; an even split over copies without fractions."""
    if fractions_LRS is None:
        fractions_LRS = even_fractions(slots_LRS, load_LE.shape[1])
    served = _at(load_LE, slots_LRS) * fractions_LRS
    return np.asarray(np.where(slots_LRS >= 0, served, 0.0).sum(axis=2))


def gap(
    slots_LRS: SlotsLRS, load_LE: LoadLE, fractions_LRS: FractionsLRS | None = None
) -> npt.NDArray[np.float64]:
    """[L]: largest rank load over the lower bound, minus one; 0 for a layer without load. Every
    slot counts as room."""
    num_ranks, num_slots = slots_LRS.shape[1:]
    largest_L = rank_load(slots_LRS, load_LE, fractions_LRS).max(axis=1)
    return over(largest_L, lower_bound(load_LE, num_ranks * num_slots, num_ranks))


def over(
    largest_L: npt.NDArray[np.float64], bound_L: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """largest / bound − 1, 0 where the bound is 0."""
    loaded_L = bound_L > 0
    return np.where(loaded_L, largest_L / np.where(loaded_L, bound_L, 1.0) - 1, 0.0)


def faults(
    slots_LRS: SlotsLRS, num_experts: int, fractions_LRS: FractionsLRS | None = None
) -> list[str]:
    """What is wrong with a plan, in words; empty when nothing is."""
    found = []
    if (slots_LRS >= num_experts).any():
        return ["a slot names an expert that does not exist"]
    missing = np.argwhere(copy_counts(slots_LRS, num_experts) == 0)
    if len(missing):
        where = tuple(missing[0].tolist())
        found.append(f"{len(missing)} experts have no slot, first (layer, expert) {where}")
    ordered = np.sort(slots_LRS, axis=2)
    twice = (ordered[:, :, 1:] == ordered[:, :, :-1]) & (ordered[:, :, 1:] >= 0)
    if twice.any():
        found.append(f"{int(twice.sum())} second copies on the same rank")
    if fractions_LRS is not None:
        if (fractions_LRS < -1e-9).any() or not np.isfinite(fractions_LRS).all():
            found.append("a fraction is negative or not finite")
        off = np.abs(_fraction_sums(slots_LRS, num_experts, fractions_LRS) - 1).max()
        if not off <= SUM_TOLERANCE:
            found.append(f"fractions of an expert miss a sum of 1 by {off:.6f}")
    return found


def weights_received(old_LRS: SlotsLRS, new_LRS: SlotsLRS) -> int:
    """How many expert weights some rank must receive that it does not hold yet."""
    num_experts = int(max(old_LRS.max(), new_LRS.max())) + 1
    received = 0
    for old_RS, new_RS in zip(old_LRS, new_LRS, strict=True):
        received += int((_holds(new_RS, num_experts) & ~_holds(old_RS, num_experts)).sum())
    return received


def _holds(slots_RS: npt.NDArray[np.integer], num_experts: int) -> npt.NDArray[np.bool_]:
    out = np.zeros((slots_RS.shape[0], num_experts + 1), dtype=np.bool_)
    np.put_along_axis(out, np.where(slots_RS >= 0, slots_RS, num_experts), True, axis=1)
    return out[:, :num_experts]


def _at(values_LE: npt.NDArray[np.generic], slots_LRS: SlotsLRS) -> npt.NDArray[np.float64]:
    """Each slot's expert's value; free slots read expert 0."""
    flat = np.maximum(slots_LRS, 0).reshape(len(slots_LRS), -1)
    return np.asarray(np.take_along_axis(values_LE, flat, axis=1)).reshape(slots_LRS.shape)


def _fraction_sums(
    slots_LRS: SlotsLRS, num_experts: int, fractions_LRS: FractionsLRS
) -> npt.NDArray[np.float64]:
    num_layers = slots_LRS.shape[0]
    key = np.arange(num_layers)[:, None, None] * num_experts + slots_LRS
    held = slots_LRS >= 0
    sums = np.bincount(key[held], fractions_LRS[held], minlength=num_layers * num_experts)
    return np.asarray(sums.reshape(num_layers, num_experts))
