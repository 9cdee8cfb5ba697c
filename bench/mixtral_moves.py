"""How few moves can keep Mixtral's shape balanced with an even split: a certificate by MILP.

Usage: python -m bench.mixtral_moves [--layers 6] [--loads zipf1.0,lognorm1.0] [--seconds 60]

For each layer the fewest arrivals after which no rank is over 5 % (or over the exact optimum where
that is more), proved by an integer program, beside the planner's. Needs scipy.

Shapes: E logical experts, R ranks, N numbers of copies.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from bench import exact_pairs, placement_loads
from bench.change_rows import DRIFTS, drawn
from bench.full_rows import EVEN
from moe_placement.capacity import Capacity
from moe_placement.placement import holders, received
from moe_placement.planner import plan

AIM = 0.05
NUM_RANKS, NUM_SLOTS = 8, 2


def main() -> None:
    options = _options()
    capacity, goal = Capacity.of(NUM_SLOTS, NUM_RANKS), replace(EVEN, aim=AIM)
    for kind in options.loads.split(","):
        load = placement_loads.make_load("a", kind)
        for amount in DRIFTS:
            then = placement_loads.drift(load, amount, drawn("a", kind, amount))
            rows = slice(0, options.layers)
            old = plan(load[rows], capacity, goal).placement
            new = plan(then[rows], capacity, goal, old).placement.slots_LRS
            held_LRE = holders(old.slots_LRS, load.shape[1])
            ours, fewest = [], []
            for layer, load_E in enumerate(then[rows]):
                part = slice(layer, layer + 1)
                ours.append(received(old.slots_LRS[part], new[part]))
                bound = placement_loads.lower_bound(then[part], 2 * NUM_RANKS, NUM_RANKS)[0]
                best = exact_pairs.best_even_level(load_E, NUM_RANKS)
                level = max(bound * (1 + AIM), best * (1 + 1e-7))
                fewest.append(fewest_moves(load_E, held_LRE[layer], level, options.seconds))
            slots = NUM_RANKS * NUM_SLOTS * len(ours)
            print(
                f"{kind} ±{amount:.0%}: ours {ours} = {sum(ours) / slots:.1%} of slots, "
                f"at least {fewest} = {sum(fewest) / slots:.1%}"
            )


def fewest_moves(
    load_E: npt.NDArray[np.float64],
    held_RE: npt.NDArray[np.bool_],
    level: float,
    max_seconds: float,
) -> int:
    """Fewest experts that ranks must receive so that no rank's load is above `level`; what is
    proved by the end of the time."""
    num_ranks, num_experts = held_RE.shape
    # Variables: rank r holds expert e, of which there are n copies; expert e has n copies.
    holds = np.arange(num_ranks * num_experts * num_ranks)
    holds_REN = holds.reshape(num_ranks, num_experts, num_ranks)
    has_EN = len(holds) + np.arange(num_experts * num_ranks).reshape(num_experts, num_ranks)
    num_variables = len(holds) + has_EN.size
    copies_N = np.arange(1, num_ranks + 1)
    rows = []
    for expert in range(num_experts):
        rows.append((has_EN[expert], np.ones(num_ranks), 1.0, 1.0))
        for n, copies in enumerate(copies_N.tolist()):
            columns = np.append(holds_REN[:, expert, n], has_EN[expert, n])
            rows.append((columns, np.append(np.ones(num_ranks), -copies), 0.0, 0.0))
            for rank in range(num_ranks):
                columns = np.array([holds_REN[rank, expert, n], has_EN[expert, n]])
                rows.append((columns, np.array([1.0, -1.0]), -1.0, 0.0))
    share_EN = load_E[:, None] / copies_N / level
    for rank in range(num_ranks):
        columns = holds_REN[rank].ravel()
        rows.append((columns, np.ones(len(columns)), 0.0, float(NUM_SLOTS)))
        rows.append((columns, share_EN.ravel(), 0.0, 1 + 1e-9))
    matrix = coo_array(
        (
            np.concatenate([row[1] for row in rows]),
            (
                np.repeat(np.arange(len(rows)), [len(row[0]) for row in rows]),
                np.concatenate([row[0] for row in rows]),
            ),
        ),
        (len(rows), num_variables),
    )
    cost = np.zeros(num_variables)
    cost[holds_REN[~held_RE].ravel()] = 1.0
    solved = milp(
        cost,
        constraints=LinearConstraint(
            matrix.tocsr(), [row[2] for row in rows], [row[3] for row in rows]
        ),
        integrality=np.ones(num_variables),
        bounds=Bounds(0, 1),
        options={"time_limit": max_seconds},
    )
    proved = solved.mip_dual_bound if solved.mip_dual_bound is not None else 0.0
    return max(0, int(np.ceil(proved - 1e-6)))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--loads", default="zipf1.0,lognorm1.0")
    parser.add_argument("--seconds", type=float, default=60.0, help="for one layer at most")
    return parser.parse_args()


if __name__ == "__main__":
    main()
