"""The same plan from the same input, in any process, whatever the order in which ranks are listed.

Ties are broken by the lowest expert, then the lowest rank, and never by the order of a set, an
unstable sort or a hash. Elsewhere a plan depended on the interpreter (case A03).

Shapes: L layers, E logical experts, R ranks, S physical slots a rank.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from moe_placement.capacity import Capacity
from moe_placement.goal import Goal, Split
from moe_placement.placement import Placement, received
from moe_placement.planner import plan

PROCESSES, PLANS_EACH = 5, 10

PLANS = """
import hashlib, sys
import numpy as np
from moe_placement.capacity import Capacity
from moe_placement.goal import Goal, Split
from moe_placement.planner import plan

def digest(placement):
    arrays = placement.slots_LRS.astype("<i4"), placement.fractions_LRS.astype("<f8")
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()

for split in Split:
    for _ in range({plans}):
        tied = plan(np.full((1, 12), 5.0), Capacity.of(4, 4), Goal(split=split)).placement
        print("tied", split, digest(tied))
    rng = np.random.default_rng(7)
    load = rng.lognormal(3, 1, (3, 40)).round()
    capacity = Capacity.of([5, 6, 7, 5, 5, 5, 0, 9, 5], speeds=[1, 1, .7, 1, 1, 1, 1, 1, 2])
    first = plan(load, capacity, Goal(split=split)).placement
    after = plan(load[:, ::-1], capacity, Goal(split=split, max_moves=30), first).placement
    print("mixed", split, digest(first), digest(after))
"""


def plans_of_a_process(hash_seed: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PLANS.format(plans=PLANS_EACH)],
        env={
            **os.environ,
            "PYTHONHASHSEED": str(hash_seed),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return done.stdout.splitlines()


def test_a03_fifty_plans_of_fresh_processes_are_one_plan() -> None:
    lines = [line for seed in range(PROCESSES) for line in plans_of_a_process(seed)]
    tied = [line for line in lines if line.startswith("tied")]
    assert len(tied) == 2 * PROCESSES * PLANS_EACH
    assert len(set(tied)) == 2, "one plan for each kind of split"
    assert len({line for line in lines if line.startswith("mixed")}) == 2


@pytest.mark.parametrize("split", list(Split))
def test_a03_equal_loads_go_to_the_lowest_expert_and_rank(split: Split) -> None:
    """12 tied experts on 4 ranks with 4 slots: 3 different experts on each, none twice."""
    load = np.full((1, 12), 5.0)
    slots = plan(load, Capacity.of(4, 4), Goal(split=split)).placement.slots_LRS[0]
    for row in slots:
        filled = row[row >= 0].tolist()
        assert len(filled) == len(set(filled))
    assert 0 in slots[0], "the first expert is on the first rank"


@pytest.mark.parametrize("split", list(Split))
def test_ranks_listed_in_another_order_get_what_they_had(split: Split) -> None:
    """Members are listed by id, so a shuffled list of the same members is the same plan; and where
    ranks keep what they hold, their order decides nothing."""
    rng = np.random.default_rng(3)
    load = rng.lognormal(4, 1, (2, 12))
    slots, speeds = [4, 3, 5, 4], [1.0, 0.7, 1.0, 2.0]
    current = plan(load, Capacity.of(slots, speeds=speeds), Goal(split=split)).placement
    order = [2, 0, 3, 1]
    shuffled = Placement(current.slots_LRS[:, order], current.fractions_LRS[:, order])
    again = plan(
        load,
        Capacity.of([slots[r] for r in order], speeds=[speeds[r] for r in order]),
        Goal(split=split),
        shuffled,
    ).placement
    assert received(shuffled.slots_LRS, again.slots_LRS) == 0


def test_layers_do_not_see_each_other() -> None:
    """A layer's plan is the same alone as among others."""
    load = np.random.default_rng(5).lognormal(3, 1.5, (6, 24))
    capacity = Capacity.of(4, 8)
    for split in Split:
        together = plan(load, capacity, Goal(split=split)).placement
        for layer in range(len(load)):
            alone = plan(load[layer : layer + 1], capacity, Goal(split=split)).placement
            assert np.array_equal(alone.slots_LRS[0], together.slots_LRS[layer])
            assert np.allclose(alone.fractions_LRS[0], together.fractions_LRS[layer])
