"""A slow, plain judge of walks: follows every wave slot by slot and says what it did wrong.

It knows nothing of how waves are chosen, only what no wave may ever do.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from moe_api.plan import SlotsLRS
from moe_placement.walk import migration, waves
from moe_placement.walk.waves import Limits


def follow(current: SlotsLRS, target: SlotsLRS, limits: Limits) -> list[SlotsLRS]:
    """All waves to the target, each of them judged; fails where the walk stops short of a target
    that it could get nearer to."""
    steps = []
    at = current
    while (wave := waves.next_wave(at, target, limits)) is not None:
        judge_wave(at, wave, limits)
        steps.append(wave)
        at = wave
        assert len(steps) < 400, "the walk does not end"
    for layer in range(len(at)):
        if held(at[layer]) != held(target[layer]):
            assert is_jammed(at[layer], limits), f"layer {layer} stands still and could move"
    return steps


def judge_wave(old: SlotsLRS, new: SlotsLRS, limits: Limits) -> None:
    num_ranks = old.shape[1]
    live = [True] * num_ranks if limits.live_R is None else limits.live_R.tolist()
    is_open = live if limits.open_R is None else limits.open_R.tolist()
    per_rank, per_giver, per_link, moves = Counter(), Counter(), Counter(), 0
    for layer in range(len(old)):
        before, after = held(old[layer]), held(new[layer])
        serving = set().union(*(before[r] for r in range(num_ranks) if live[r]))
        assert serving <= set().union(*after), "an expert is without a live copy"
        for rank in range(num_ranks):
            room = old.shape[2] if limits.slots_R is None else int(limits.slots_R[rank])
            assert live[rank] or not after[rank], "a dead rank is named"
            came = after[rank] - before[rank]
            assert len(came) <= 1, "two arrivals on one rank and layer"
            assert not came or is_open[rank], "a rank that leaves receives"
            assert not came or len(after[rank] | before[rank]) <= room + len(
                before[rank] - after[rank]
            )
            moves += len(came)
            for slot, (was, will) in enumerate(
                zip(old[layer, rank], new[layer, rank], strict=True)
            ):
                assert was == will or was < 0 or will < 0 or not live[rank], (
                    "a slot in use is filled"
                )
                assert will < 0 or was == will or slot < room, (
                    "a slot that does not exist is filled"
                )
    for move in migration.diff(old, new, as_domains(limits), live_R=limits.live_R):
        for rank, slot in move.sources:
            assert live[rank], "a dead rank is asked"
            assert old[move.layer, rank, slot] == move.expert
        per_rank[move.rank] += 1
        if move.sources:
            giver = move.sources[0][0]
            per_giver[giver] += 1
            if (
                limits.domains_R is not None
                and limits.domains_R[giver] != limits.domains_R[move.rank]
            ):
                per_link[int(limits.domains_R[giver]), int(limits.domains_R[move.rank])] += 1
    size = limits.bytes_per_expert
    assert limits.max_moves is None or moves <= limits.max_moves
    if limits.max_rank_bytes is not None:
        assert (
            max([*per_rank.values(), *per_giver.values()], default=0) * size
            <= limits.max_rank_bytes
        )
    if limits.max_link_bytes is not None:
        assert max(per_link.values(), default=0) * size <= limits.max_link_bytes


def held(slots_RS: np.ndarray) -> list[set[int]]:
    """Experts of each rank; fails where a rank has one twice."""
    out = [[int(e) for e in row if e >= 0] for row in slots_RS]
    assert all(len(row) == len(set(row)) for row in out), "an expert twice on one rank"
    return [set(row) for row in out]


def is_jammed(slots_RS: np.ndarray, limits: Limits) -> bool:
    """No open rank has a free slot, and no expert a second live copy."""
    num_ranks, width = slots_RS.shape
    is_open = np.ones(num_ranks, bool) if limits.open_R is None else limits.open_R
    rooms = np.full(num_ranks, width) if limits.slots_R is None else limits.slots_R
    filled = (slots_RS >= 0).sum(axis=1)
    copies = Counter(slots_RS[slots_RS >= 0].tolist())
    return bool((filled >= rooms)[is_open].all()) and max(copies.values()) == 1


def as_domains(limits: Limits) -> list[list[str]] | None:
    return None if limits.domains_R is None else [[str(d)] for d in limits.domains_R.tolist()]
