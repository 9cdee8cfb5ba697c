"""Together: a plan that keeps experts which tokens choose together in one domain.

A token is sent once to every domain that holds one of its experts, so what counts is how many
domains its experts are spread over. Recorded pairs tell: experts often chosen together get the
same home domain (exchanges of homes while the pairs kept at home grow and the domains' loads stay
alike), then what slots are left over become copies where an expert's companions are. Within a
domain `full_fractions` deals as ever. Layers that this would leave unbalanced get fewer copies
across domains, and at last a plan without regard for pairs.

Neighbours: `localise` (where tokens come from, not what they choose), `split` (shares between
domains), `dispatch` (who serves whom).

Shapes: L layers, E logical experts, D domains, R ranks, S physical slots a rank, W members of a
domain (at most).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from moe_api.plan import FractionsLRS, SlotsLRS
from moe_placement.bound import lower_bound
from moe_placement.capacity import DomainsR, SlotsR, SpeedsR
from moe_placement.copy_limits import CopyLimits
from moe_placement.full import full_fractions
from moe_placement.placement import copies as copies_of
from moe_placement.score import LoadLE, rank_loads
from moe_placement.split import best_fractions

SLACK = 0.02
LOAD_WEIGHT = 2.0
"""Squared relative excess of a domain's load, against the share of all pairs kept at home."""
LEAST_GAIN = 1e-9

PairsLEE = npt.NDArray[np.float64]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MembersLED = npt.NDArray[np.bool_]


class PairsError(ValueError):
    """Pair counts that do not fit the load; the message says how."""


def plan(
    load_LE: LoadLE,
    pairs_LEE: PairsLEE,
    slots_R: SlotsR,
    speeds_R: SpeedsR,
    domains_R: DomainsR,
    copies: CopyLimits,
    slack: float = SLACK,
) -> tuple[SlotsLRS, FractionsLRS]:
    """Slots int32 and fractions float64, [L, R, S] with S = max(slots_R).

    Args:
        pairs_LEE: tokens that chose both experts of a pair; symmetric, the diagonal is not read.
        slack: how far above the bound a layer's fullest rank may be for the sake of pairs.

    Raises:
        PairsError: pairs of another shape than the load's, negative or not finite.
    """
    slots_LRS, fractions_LRS = full_fractions.plan(load_LE, slots_R, speeds_R, copies)
    pairs_LEE = _checked(pairs_LEE, load_LE)
    domains, domain_R = np.unique(domains_R[slots_R > 0], return_inverse=True)
    if len(domains) < 2:
        return slots_LRS, fractions_LRS
    usable = np.flatnonzero(slots_R > 0)
    rooms = _Rooms(slots_R[usable], speeds_R[usable], domain_R, load_LE.shape[1])
    limit_L = lower_bound(load_LE, slots_R, speeds_R, copies.max_copies) * (1 + slack)
    most = copies.most(len(usable))
    home_LE = _exchanged(load_LE, pairs_LEE, rooms, _homes(load_LE, rooms.homes_D))
    open_L = np.flatnonzero((load_LE.sum(axis=1) > 0) & (pairs_LEE.sum(axis=(1, 2)) > 0))
    for seats_D in rooms.seatings():
        if not len(open_L):
            break
        load = load_LE[open_L]
        members = _joined(pairs_LEE[open_L], home_LE[open_L], seats_D, most)
        dealt, shares = _dealt(load, members, rooms)
        level_L = (rank_loads(dealt, shares, load) / speeds_R[usable]).max(axis=1)
        counts_LE = copies_of(dealt, load.shape[1])
        good_L = (level_L <= limit_L[open_L]) & (counts_LE.max(axis=1) <= most)
        good_L &= counts_LE.min(axis=1) >= copies.min_copies
        at = np.ix_(open_L[good_L], usable, np.arange(dealt.shape[2]))
        slots_LRS[open_L[good_L]], fractions_LRS[open_L[good_L]] = -1, 0.0
        slots_LRS[at], fractions_LRS[at] = dealt[good_L], shares[good_L]
        open_L = open_L[~good_L]
    return slots_LRS, fractions_LRS


@dataclass(frozen=True)
class _Rooms:
    """What the ranks that have slots can take, and their domains together."""

    slots_R: SlotsR
    speeds_R: SpeedsR
    domain_R: Ints
    """Numbered from 0 without gaps."""
    num_experts: int

    @cached_property
    def num_ranks_D(self) -> Ints:
        return np.bincount(self.domain_R)

    @cached_property
    def room_D(self) -> Ints:
        return np.bincount(self.domain_R, self.slots_R).astype(np.int64)

    @cached_property
    def speed_D(self) -> SpeedsR:
        return np.bincount(self.domain_R, self.speeds_R).astype(np.float64)

    @cached_property
    def homes_D(self) -> Ints:
        """How many experts are at home in each domain: by room, the largest remainders first."""
        exact_D = self.room_D / self.room_D.sum() * self.num_experts
        homes_D = np.floor(exact_D).astype(np.int64)
        order_D = np.argsort(homes_D - exact_D, kind="stable")
        homes_D[order_D[: self.num_experts - int(homes_D.sum())]] += 1
        return np.asarray(homes_D)

    def seatings(self) -> list[Ints]:
        """Experts that each domain is to hold: as many as it has slots, then a rank's less each
        time, down to where its ranks can always share them exactly."""
        out: list[Ints] = []
        for fewer in range(int(self.num_ranks_D.max())):
            seats_D = self.room_D - np.minimum(fewer, self.num_ranks_D - 1)
            seats_D = np.clip(seats_D, self.homes_D, self.num_experts)
            if not out or not np.array_equal(seats_D, out[-1]):
                out.append(seats_D)
        return out


def _checked(pairs_LEE: PairsLEE, load_LE: LoadLE) -> PairsLEE:
    num_layers, num_experts = load_LE.shape
    if pairs_LEE.shape != (num_layers, num_experts, num_experts):
        raise PairsError(
            f"pairs have shape {pairs_LEE.shape}, expected [{num_layers}, {num_experts}, "
            f"{num_experts}] for this load"
        )
    if not np.isfinite(pairs_LEE).all() or (pairs_LEE < 0).any():
        raise PairsError("pairs are counts of tokens: finite and not negative")
    out = pairs_LEE.astype(np.float64)
    out[:, np.arange(num_experts), np.arange(num_experts)] = 0.0
    return out


def _homes(load_LE: LoadLE, homes_D: Ints) -> Ints:
    """A first home for each expert [L, E]: by load, dealt out to the domains in turn."""
    turn_E = np.argsort(np.concatenate([(np.arange(n) + 0.5) / n for n in homes_D]), kind="stable")
    domain_E = np.repeat(np.arange(len(homes_D)), homes_D)[turn_E]
    order_LE = np.argsort(-load_LE, axis=1, kind="stable")
    home_LE = np.zeros(load_LE.shape, dtype=np.int64)
    np.put_along_axis(home_LE, order_LE, np.broadcast_to(domain_E, home_LE.shape), 1)
    return home_LE


def _exchanged(load_LE: LoadLE, pairs_LEE: PairsLEE, rooms: _Rooms, home_LE: Ints) -> Ints:
    """Homes after exchanges of two experts, the best one of each layer at a time, while one gains.

    An expert whose best exchange does not gain is passed over until another takes place.
    """
    home_LE = home_LE.copy()
    num_layers, num_experts = load_LE.shape
    member_LED = np.eye(len(rooms.room_D))[home_LE]
    near_LED = np.matmul(pairs_LEE, member_LED)
    scale_L = np.maximum(pairs_LEE.sum(axis=(1, 2)), 1e-300)
    share_LE = load_LE / np.maximum(load_LE.sum(axis=1), 1e-300)[:, None]
    speed_D = rooms.speed_D / rooms.speed_D.sum()
    load_LD = np.einsum("le,led->ld", share_LE, member_LED) / speed_D
    passed_LE = np.zeros(load_LE.shape, dtype=np.bool_)
    open_L = np.arange(num_layers)
    for _ in range(4 * num_experts * num_experts):
        if not len(open_L):
            break
        n, home = np.arange(len(open_L)), home_LE[open_L]
        near, share, load = near_LED[open_L], share_LE[open_L], load_LD[open_L]
        gain = near - np.take_along_axis(near, home[:, :, None], 2)
        gain[n[:, None], np.arange(num_experts), home] = -np.inf
        first = np.where(passed_LE[open_L], -np.inf, gain.max(axis=2)).argmax(axis=1)
        from_ = home[n, first]
        # The best partner of `first`, in any other domain.
        both = (
            gain[n, first][n[:, None], home]
            + gain[n[:, None], np.arange(num_experts), from_[:, None]]
        )
        both = 2 * (both - 2 * pairs_LEE[open_L, first]) / scale_L[open_L][:, None]
        moved = share - share[n, first][:, None]
        here, there = load[n, from_][:, None], np.take_along_axis(load, home, 1)
        worse = (here + moved / speed_D[from_][:, None] - 1) ** 2 - (here - 1) ** 2
        worse += (there - moved / speed_D[home] - 1) ** 2 - (there - 1) ** 2
        total = np.where(home == from_[:, None], -np.inf, both - LOAD_WEIGHT * worse)
        second = total.argmax(axis=1)
        gains = total[n, second] > LEAST_GAIN
        passed_LE[open_L[~gains], first[~gains]] = True
        layers, one, two = open_L[gains], first[gains], second[gains]
        passed_LE[layers] = False
        a, b = home_LE[layers, one], home_LE[layers, two]
        change = pairs_LEE[layers, two] - pairs_LEE[layers, one]
        near_LED[layers, :, a] += change
        near_LED[layers, :, b] -= change
        shift = share_LE[layers, two] - share_LE[layers, one]
        load_LD[layers, a] += shift / speed_D[a]
        load_LD[layers, b] -= shift / speed_D[b]
        home_LE[layers, one], home_LE[layers, two] = b, a
        open_L = open_L[~passed_LE[open_L].all(axis=1)]
    return home_LE


def _joined(pairs_LEE: PairsLEE, home_LE: Ints, seats_D: Ints, most: int) -> MembersLED:
    """Experts of each domain: those at home, and where seats are left, those with most companions
    there, counted the less the more copies they have."""
    num_layers, num_experts = home_LE.shape
    layers = np.arange(num_layers)
    member_LED = np.eye(len(seats_D), dtype=np.bool_)[home_LE]
    near_LED = np.matmul(pairs_LEE, member_LED.astype(np.float64))
    for _ in range(int(seats_D.sum()) - num_experts):
        copies_LE1 = member_LED.sum(axis=2, keepdims=True)
        free_LED = ~member_LED & (member_LED.sum(axis=1) < seats_D)[:, None, :]
        free_LED &= copies_LE1 < most
        value = np.where(free_LED, near_LED / copies_LE1, -np.inf)
        best_L = value.reshape(num_layers, -1).argmax(axis=1)
        expert_L, domain_L = np.divmod(best_L, len(seats_D))
        some = free_LED[layers, expert_L, domain_L]
        rows, expert_L, domain_L = layers[some], expert_L[some], domain_L[some]
        member_LED[rows, expert_L, domain_L] = True
        near_LED[rows, :, domain_L] += pairs_LEE[rows, expert_L]
    return member_LED


def _dealt(load_LE: LoadLE, member_LED: MembersLED, rooms: _Rooms) -> tuple[SlotsLRS, FractionsLRS]:
    """Slots and fractions of the ranks with slots: shares between domains first, then each domain
    for itself."""
    num_layers, _, num_domains = member_LED.shape
    width = int(member_LED.sum(axis=1).max())
    there_LDE = member_LED.transpose(0, 2, 1)
    order_LDW = np.argsort(~there_LDE, axis=2, kind="stable")[:, :, :width]
    held_LDW = np.take_along_axis(there_LDE, order_LDW, 2)
    member_LDW = np.where(held_LDW, order_LDW, -1).astype(np.int32)
    share_LDW = best_fractions(load_LE, member_LDW, rooms.speed_D)
    num_slots = int(rooms.slots_R.max())
    slots = np.full((num_layers, len(rooms.slots_R), num_slots), -1, dtype=np.int32)
    fractions = np.zeros(slots.shape)
    layers = np.arange(num_layers)[:, None, None]
    for domain in range(num_domains):
        ranks = np.flatnonzero(rooms.domain_R == domain)
        # Layers may differ in how many experts a domain holds (few companions, or a copy limit).
        count_L = held_LDW[:, domain].sum(axis=1)
        for count in np.unique(count_L[count_L > 0]).tolist():
            rows = np.flatnonzero(count_L == count)
            expert = member_LDW[rows, domain, :count].astype(np.int64)
            share = share_LDW[rows, domain, :count]
            load = np.take_along_axis(load_LE[rows], expert, 1) * share
            local, within = full_fractions.plan(
                load, rooms.slots_R[ranks], rooms.speeds_R[ranks], CopyLimits()
            )
            at = np.maximum(local, 0)
            part = layers[: len(rows)]
            there = np.ix_(rows, ranks, np.arange(local.shape[2]))
            slots[there] = np.where(local >= 0, expert[part, at], -1)
            fractions[there] = np.where(local >= 0, within * share[part, at], 0.0)
    return slots, fractions
