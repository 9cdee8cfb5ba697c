"""Homes: how many copies of each expert every domain holds, so that tokens find one at home.

A copy in a domain saves the crossings of the tokens that this domain sends to the expert, as far
as a rank can carry them. The copies that save most come first, over all domains; an expert that
none of them is for gets a home of its own, the most loaded experts first, where most of its tokens
come from unless that domain is getting full. Neighbours: `localise` (the recipe), `packing` (puts
a domain's copies on its ranks).

Shapes: L layers, E logical experts, D domains, X possible copies of a layer (expert, domain and
number of the copy in it).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_placement.topology.dispatch import LoadLED
from moe_placement.topology.topology import Topology

CountsLED = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEVELLING = 0.05
"""Crossings, as a share of an expert's tokens, that its home may cost to put it into an empty
domain rather than a full one."""
OVERFLOW = 4.0
"""The same for a domain that would be filled twice over."""
_TIE = 1e-6


def choose(
    load_LED: LoadLED,
    topology: Topology,
    level_L: Floats,
    min_copies: int,
    max_copies: int,
    worth_LED: LoadLED | None = None,
) -> CountsLED:
    """Copies of each expert in each domain, int64 [L, E, D]; all slots are used unless max_copies
    forbids it.

    Args:
        level_L: load ÷ speed that a rank may have.
        worth_LED: what it is worth, in tokens that do not cross, that the domain is an expert's
            home, besides the tokens that it sends itself.
    """
    carry_LD = carried(load_LED, topology, level_L)
    needed_LE = _needed(load_LED, topology, level_L, min_copies, max_copies)
    room = int(topology.slots_D.sum())
    extra_L = room - needed_LE.sum(axis=1)
    counts_LED = _worthwhile(load_LED, carry_LD, needed_LE, topology, level_L, extra_L, max_copies)
    _settle(counts_LED, load_LED, needed_LE, topology, carry_LD, level_L, worth_LED)
    _fill(counts_LED, load_LED, topology, carry_LD, level_L, max_copies)
    return counts_LED


def _needed(
    load_LED: LoadLED, topology: Topology, level_L: Floats, min_copies: int, max_copies: int
) -> Ints:
    """Copies that an expert needs for its load, int64 [L, E]: none carries more than it should, or
    if the slots do not suffice for that, more than a rank can."""
    load_LE = load_LED.sum(axis=2)
    out_LE = np.full(load_LE.shape, min_copies, dtype=np.int64)
    for most_LD in (_whole_rank(topology, level_L), carried(load_LED, topology, level_L)):
        most_L1 = most_LD.max(axis=1, keepdims=True)
        wanted_LE = np.ceil(load_LE / most_L1 - _TIE).clip(min_copies, max_copies)
        fits_L1 = wanted_LE.sum(axis=1, keepdims=True) <= topology.slots_D.sum()
        out_LE = np.where(fits_L1, wanted_LE.astype(np.int64), out_LE)
    return out_LE


def carried(load_LED: LoadLED, topology: Topology, level_L: Floats) -> Floats:
    """The most that a copy should carry [L, D]: the other slots of its rank hold experts too, of
    the least loaded third at least."""
    load_LE = np.sort(load_LED.sum(axis=2), axis=1)
    cold_L = load_LE[:, : max(1, load_LE.shape[1] // 3)].mean(axis=1)
    ranks_D = np.maximum(topology.ranks_D, 1)
    others_D = np.maximum(topology.slots_D / ranks_D - 1.0, 0.0)
    most_LD = _whole_rank(topology, level_L)
    out_LD: Floats = np.maximum(most_LD - others_D * cold_L[:, None], most_LD / 2)
    return out_LD


def _whole_rank(topology: Topology, level_L: Floats) -> Floats:
    """What a rank of each domain can take, on average, [L, D]."""
    return level_L[:, None] * topology.speeds_D / np.maximum(topology.ranks_D, 1)


def _worthwhile(
    load_LED: LoadLED,
    carry_LD: Floats,
    needed_LE: Ints,
    topology: Topology,
    level_L: Floats,
    extra_L: Ints,
    max_copies: int,
) -> CountsLED:
    """All copies of the experts that get more than they need, because these save most."""
    saved_LEN, domain_LEN = _savings(load_LED, carry_LD, topology, max_copies)
    num_layers, _, num_each = saved_LEN.shape
    beyond_LEN = np.arange(num_each) >= needed_LE[:, :, None]
    candidate_LX = np.where(beyond_LEN, saved_LEN, 0.0).reshape(num_layers, -1)
    taken_LX = (_places(-candidate_LX) < extra_L[:, None]) & (candidate_LX > 0)
    taken_LEN = taken_LX.reshape(saved_LEN.shape)
    taken_LEN |= ~beyond_LEN & taken_LEN.any(axis=2, keepdims=True)
    layer_X, expert_X, _ = np.nonzero(taken_LEN)
    domain_X, saved_X = domain_LEN[taken_LEN], saved_LEN[taken_LEN]
    # A domain takes no more than it has slots, nor tokens than its ranks can: what saves most.
    full_LD = level_L[:, None] * topology.speeds_D
    group_X = layer_X * topology.num_domains + domain_X
    order_X = np.lexsort((-saved_X, group_X))
    layer_X, expert_X, domain_X = layer_X[order_X], expert_X[order_X], domain_X[order_X]
    saved_X, group_X = saved_X[order_X], group_X[order_X]
    first_X = np.searchsorted(group_X, group_X)
    before_X = np.cumsum(saved_X) - saved_X
    before_X -= before_X[first_X]
    kept_X = np.arange(len(group_X)) - first_X < topology.slots_D[domain_X]
    kept_X &= before_X < full_LD[layer_X, domain_X]
    counts_LED = np.zeros(load_LED.shape, dtype=np.int64)
    np.add.at(counts_LED, (layer_X[kept_X], expert_X[kept_X], domain_X[kept_X]), 1)
    return counts_LED


def _savings(
    load_LED: LoadLED, carry_LD: Floats, topology: Topology, max_copies: int
) -> tuple[Floats, Ints]:
    """What each next copy of an expert saves, the best first, and the domain it is in, [L, E, N].

    The first copy in a domain saves what one copy carries of the domain's tokens, the second what
    that leaves. Among equals the copies are spread, and each expert starts at another domain, so
    that none is preferred.
    """
    num_layers, num_experts, num_domains = load_LED.shape
    carry_L1D = np.where(carry_LD > 0, carry_LD, np.inf)[:, None]
    most = int(np.ceil(load_LED / carry_L1D).max(initial=1.0).clip(1, topology.ranks_D.max()))
    turn_ED = (np.arange(num_domains) + np.arange(num_experts)[:, None]) % num_domains
    turned_LED = np.take_along_axis(load_LED, turn_ED[None], 2)[:, :, None]
    carry_LED = carry_LD[:, turn_ED][:, :, None]
    number_C1 = np.arange(most)[:, None]
    saved_LECD = np.clip(turned_LED - number_C1 * carry_LED, 0.0, carry_LED)
    saved_LECD = np.where(number_C1 < topology.ranks_D[turn_ED][:, None], saved_LECD, 0.0)
    flat_LEX = saved_LECD.reshape(num_layers, num_experts, -1)
    order_LEN = np.argsort(-flat_LEX, axis=2, kind="stable")[:, :, :max_copies]
    domain_LEN = turn_ED[np.arange(num_experts)[None, :, None], order_LEN % num_domains]
    return np.take_along_axis(flat_LEX, order_LEN, 2), domain_LEN


def _settle(
    counts_LED: CountsLED,
    load_LED: LoadLED,
    needed_LE: Ints,
    topology: Topology,
    carry_LD: Floats,
    level_L: Floats,
    worth_LED: LoadLED | None,
) -> None:
    """Homes for the copies that are needed and still missing, the most loaded experts first."""
    load_LE = load_LED.sum(axis=2)
    num_layers, num_experts = load_LE.shape
    layers = np.arange(num_layers)
    free_LD = topology.slots_D - counts_LED.sum(axis=1)
    full_LD = level_L[:, None] * topology.speeds_D
    full_LD = np.where(full_LD > 0, full_LD, 1.0)
    filled_LD = _taken_by(counts_LED, load_LED, carry_LD).sum(axis=1)
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    missing_LE = needed_LE - counts_LED.sum(axis=2)
    turns_E = np.take_along_axis(missing_LE, order_LE, 1).clip(0).max(axis=0)
    for place in np.repeat(np.arange(num_experts), turns_E):
        expert = order_LE[:, place]
        count_LD = counts_LED[layers, expert]
        part = load_LE[layers, expert] / needed_LE[layers, expert]
        saved_LD = np.clip(load_LED[layers, expert] - count_LD * carry_LD, 0.0, carry_LD)
        if worth_LED is not None:
            saved_LD = saved_LD + worth_LED[layers, expert]
        fullness_LD = (filled_LD + part[:, None]) / full_LD
        cost_LD = LEVELLING * fullness_LD + OVERFLOW * np.maximum(fullness_LD - 1.0, 0.0)
        score_LD = saved_LD - load_LE[layers, expert, None] * cost_LD
        open_LD = (free_LD > 0) & (count_LD < topology.ranks_D)
        domain = np.argmax(np.where(open_LD, score_LD, -np.inf), axis=1)
        write = np.flatnonzero((missing_LE[layers, expert] > 0) & open_LD[layers, domain])
        counts_LED[write, expert[write], domain[write]] += 1
        missing_LE[write, expert[write]] -= 1
        free_LD[write, domain[write]] -= 1
        filled_LD[write, domain[write]] += part[write]


def _taken_by(counts_LED: CountsLED, load_LED: LoadLED, carry_LD: Floats) -> Floats:
    """What each domain's copies would take: its own tokens, and their part of the others'."""
    own_LED = np.minimum(load_LED, counts_LED * carry_LD[:, None])
    copies_LE = counts_LED.sum(axis=2)
    rest_LE = np.where(copies_LE > 0, (load_LED - own_LED).sum(axis=2), 0.0)
    return np.asarray(own_LED + counts_LED * (rest_LE / np.maximum(copies_LE, 1))[:, :, None])


def _fill(
    counts_LED: CountsLED,
    load_LED: LoadLED,
    topology: Topology,
    carry_LD: Floats,
    level_L: Floats,
    max_copies: int,
) -> None:
    """More copies in domains that still have slots, one after another, those that save most."""
    load_LE = load_LED.sum(axis=2)
    layers = np.arange(len(load_LED))
    total_LE, filled_LD = counts_LED.sum(axis=2), counts_LED.sum(axis=1)
    for _ in range(int(topology.slots_D.max(initial=0))):
        before = total_LE.sum()
        room_LD = level_L[:, None] * topology.speeds_D
        room_LD = np.maximum(room_LD - _taken_by(counts_LED, load_LED, carry_LD).sum(axis=1), 0.0)
        for domain in np.flatnonzero((filled_LD < topology.slots_D).any(axis=0)):
            count_LE, carry_L1 = counts_LED[:, :, domain], carry_LD[:, domain, None]
            saved_LE = np.clip(load_LED[:, :, domain] - count_LE * carry_L1, 0.0, carry_L1)
            saved_LE = np.minimum(saved_LE, room_LD[:, domain, None])
            score_LE = saved_LE + _TIE * load_LE / np.maximum(total_LE, 1)
            open_LE = (count_LE < topology.ranks_D[domain]) & (total_LE < max_copies)
            open_LE &= (filled_LD[:, domain] < topology.slots_D[domain])[:, None]
            expert = np.argmax(np.where(open_LE, score_LE, -np.inf), axis=1)
            write = np.flatnonzero(open_LE[layers, expert])
            counts_LED[write, expert[write], domain] += 1
            total_LE[write, expert[write]] += 1
            filled_LD[write, domain] += 1
        if total_LE.sum() == before:
            return


def _places(value_LX: Floats) -> Ints:
    """Place of each value among its row's, the least first."""
    order_LX = np.argsort(value_LX, axis=1, kind="stable")
    places_LX = np.empty_like(order_LX)
    np.put_along_axis(places_LX, order_LX, np.arange(value_LX.shape[1])[None], 1)
    return places_LX
