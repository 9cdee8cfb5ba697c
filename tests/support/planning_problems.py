"""Planning problems drawn by hypothesis: any ranks, slots, speeds, loads, limits and present plan.

Nothing divides evenly on purpose: ranks may be dead or drain, have no slot or more than there are
experts, layers differ in their number of experts, loads tie or are zero. Neighbours: `faults` of
`moe_placement.placement` and the judge in `bench` say what is wrong with an answer.

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from moe_api.plan import SlotsLRS
from moe_placement.capacity import Capacity
from moe_placement.placement import Placement

MAX_RANKS = 6
MAX_EXPERTS = 11


@dataclass(frozen=True)
class Problem:
    load_LE: npt.NDArray[np.float64]
    capacity: Capacity
    experts_L: npt.NDArray[np.int64]
    current: Placement | None


@st.composite
def capacities(
    draw: st.DrawFn, num_experts: int, *, alike: bool = False, closed: bool = True
) -> Capacity:
    """Ranks whose open ones have room for every expert once."""
    num_ranks = draw(st.integers(1, MAX_RANKS))
    least = -(-num_experts // num_ranks)
    if alike:
        slots = [draw(st.integers(least, least + 3))] * num_ranks
        return Capacity.of(slots)
    slots = draw(st.lists(st.integers(0, least + 3), min_size=num_ranks, max_size=num_ranks))
    speeds = draw(
        st.lists(st.sampled_from([1.0, 1.0, 0.7, 0.5, 3.0]), min_size=num_ranks, max_size=num_ranks)
    )
    domains = draw(st.lists(st.integers(0, 2), min_size=num_ranks, max_size=num_ranks))
    states = st.sampled_from(["open", "open", "open", "dead", "draining"])
    state = draw(st.lists(states, min_size=num_ranks, max_size=num_ranks))
    if not closed:
        state = ["open"] * num_ranks
    elif "open" not in state:
        state[draw(st.integers(0, num_ranks - 1))] = "open"
    slots = _with_room(slots, [state[rank] == "open" for rank in range(num_ranks)], num_experts)
    return Capacity.of(
        slots,
        speeds=speeds,
        dead=[rank for rank in range(num_ranks) if state[rank] == "dead"],
        draining=[rank for rank in range(num_ranks) if state[rank] == "draining"],
        domains=domains,
    )


def _with_room(slots: list[int], is_open: list[bool], num_experts: int) -> list[int]:
    """More slots for the open ranks, one by one, until every expert fits on them."""
    slots = list(slots)
    open_ranks = [rank for rank in range(len(slots)) if is_open[rank]]
    while sum(min(slots[rank], num_experts) for rank in open_ranks) < num_experts:
        slots[min(open_ranks, key=lambda rank: slots[rank])] += 1
    return slots


@st.composite
def loads(draw: st.DrawFn, num_layers: int, num_experts: int) -> npt.NDArray[np.float64]:
    """Token counts [L, E]: few or many, tied, zero, or with one expert that outweighs the rest."""
    count = st.one_of(st.integers(0, 4), st.integers(0, 1000), st.just(100_000))
    size = num_layers * num_experts
    drawn = draw(st.lists(count, min_size=size, max_size=size))
    return np.asarray(drawn, dtype=np.float64).reshape(num_layers, num_experts)


@st.composite
def problems(
    draw: st.DrawFn,
    *,
    present: bool | None = None,
    closed: bool = True,
    ragged: bool = True,
    stays: bool = False,
) -> Problem:
    """Args: present: with a plan in force always (True), never (False), or sometimes (None).
    stays: nothing of the plan in force is on a rank that leaves."""
    num_layers = draw(st.integers(1, 3))
    num_experts = draw(st.integers(1, MAX_EXPERTS))
    capacity = draw(capacities(num_experts, closed=closed))
    experts_L = np.full(num_layers, num_experts, dtype=np.int64)
    if ragged:
        fewer = draw(st.lists(st.integers(0, 3), min_size=num_layers, max_size=num_layers))
        experts_L = np.maximum(experts_L - np.asarray(fewer), 1)
    load_LE = draw(loads(num_layers, num_experts))
    load_LE[np.arange(num_experts) >= experts_L[:, None]] = 0
    current = None
    if present or (present is None and draw(st.booleans())):
        current = Placement.even(draw(placements(capacity, experts_L, stays=stays)))
    return Problem(load_LE, capacity, experts_L, current)


@st.composite
def placements(
    draw: st.DrawFn, capacity: Capacity, experts_L: npt.NDArray[np.int64], *, stays: bool = False
) -> SlotsLRS:
    """A valid placement on the live ranks (open ones if it `stays`), with up to two spare slots a
    rank and copies at random."""
    spare = draw(st.integers(0, 2))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = int(capacity.slots_R.max()) + spare
    slots = np.full((len(experts_L), capacity.num_ranks, width), -1, dtype=np.int32)
    holds_R = capacity.open_R if stays else capacity.live_R
    room_R = np.where(holds_R, capacity.slots_R, 0)
    for layer, num_experts in enumerate(experts_L.tolist()):
        held = _random_holders(num_experts, room_R, rng)
        for rank, experts in enumerate(held):
            at = rng.permutation(width)[: len(experts)]
            slots[layer, rank, at] = experts
    return slots


def _random_holders(
    num_experts: int, room_R: npt.NDArray[np.int64], rng: np.random.Generator
) -> list[list[int]]:
    """Each expert on a rank with room (a legal choice exists), then copies while dice allow."""
    held: list[list[int]] = [[] for _ in room_R]
    for expert in rng.permutation(num_experts).tolist():
        free = [rank for rank, room in enumerate(room_R) if len(held[rank]) < room]
        held[rng.choice(free)].append(expert)
    for rank, room in enumerate(room_R.tolist()):
        others = rng.permutation([e for e in range(num_experts) if e not in held[rank]])
        extra = int(rng.integers(0, room - len(held[rank]) + 1))
        held[rank] += others[:extra].astype(int).tolist()
    return held
