"""What the best split and the best placement of a small layer are, by means of their own.

`best_level` solves the split of a given placement as a linear program; `placements` enumerates
every placement of a few experts, and `enumerated_level` the best of them: by the theorem of Hall
for fractions, by counting for even splits.

Shapes: E logical experts, R ranks, S slots a rank, P placements, A sets of experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array

HoldersPRE = npt.NDArray[np.bool_]


def best_level(
    load_E: npt.NDArray[np.float64],
    slots_RS: npt.NDArray[np.integer],
    speeds_R: npt.NDArray[np.float64],
) -> float:
    """Smallest largest load ÷ speed over all splits of one layer's load among the copies."""
    rank_N, slot_N = np.nonzero(slots_RS >= 0)
    expert_N = slots_RS[rank_N, slot_N].astype(np.int64)
    num_copies, num_ranks = len(rank_N), len(speeds_R)
    total = float(load_E.sum())
    # Variables: tokens of each copy, then the level. Tokens are shares of the layer's total, so
    # that the solver's absolute tolerances mean the same for every load.
    sums = coo_array(
        (np.ones(num_copies), (expert_N, np.arange(num_copies))), (len(load_E), num_copies + 1)
    )
    held = np.zeros(len(load_E), dtype=np.bool_)
    held[expert_N] = True
    level_column = np.full(num_ranks, num_copies)
    within = coo_array(
        (
            np.concatenate([np.ones(num_copies), -speeds_R]),
            (
                np.concatenate([rank_N, np.arange(num_ranks)]),
                np.concatenate([np.arange(num_copies), level_column]),
            ),
        ),
        (num_ranks, num_copies + 1),
    )
    cost = np.zeros(num_copies + 1)
    cost[-1] = 1.0
    solved = linprog(
        cost,
        A_ub=within,
        b_ub=np.zeros(num_ranks),
        A_eq=sums.tocsr()[held],
        b_eq=load_E[held] / total,
        method="highs",
    )
    assert solved.status == 0, solved.message
    return float(solved.fun) * total


def placements(num_experts: int, slots_R: Sequence[int]) -> HoldersPRE:
    """Every way to hold each of a few experts at least once, [P, R, E], for fractions.

    A rank holds as many experts as it can: an unused copy serves nothing and harms nothing.
    """
    return _complete(num_experts, [_subsets(num_experts, (min(s, num_experts),)) for s in slots_R])


def placements_even(num_experts: int, slots_R: Sequence[int]) -> HoldersPRE:
    """The same for even splits, where a copy more can do harm: ranks may hold fewer."""
    return _complete(
        num_experts,
        [_subsets(num_experts, range(min(s, num_experts) + 1)) for s in slots_R],
    )


def enumerated_level(
    load_E: npt.NDArray[np.float64], holders_PRE: HoldersPRE, speeds_R: npt.NDArray[np.float64]
) -> float:
    """Best level over placements with the best split of each: max over sets of experts of their
    load ÷ the speed of all ranks that hold one of them."""
    num_experts = len(load_E)
    level_P = np.zeros(len(holders_PRE))
    for members in range(1, 2**num_experts):
        inside_E = (members >> np.arange(num_experts)) & 1 == 1
        speed_P = holders_PRE[:, :, inside_E].any(axis=2) @ speeds_R
        level_P = np.maximum(level_P, load_E[inside_E].sum() / speed_P)
    return float(level_P.min())


def enumerated_even_level(
    load_E: npt.NDArray[np.float64], holders_PRE: HoldersPRE, speeds_R: npt.NDArray[np.float64]
) -> float:
    """Best level over placements when every copy serves the same share."""
    share_PE = load_E / holders_PRE.sum(axis=1)
    load_PR = np.einsum("pre,pe->pr", holders_PRE, share_PE)
    return float((load_PR / speeds_R).max(axis=1).min())


def _subsets(num_experts: int, sizes: Sequence[int]) -> npt.NDArray[np.bool_]:
    rows = [
        np.isin(np.arange(num_experts), chosen)
        for size in sizes
        for chosen in itertools.combinations(range(num_experts), size)
    ]
    return np.stack(rows)


def _complete(num_experts: int, choices: list[npt.NDArray[np.bool_]]) -> HoldersPRE:
    index = np.indices([len(choice) for choice in choices]).reshape(len(choices), -1)
    holders_PRE = np.stack([c[i] for c, i in zip(choices, index, strict=True)], axis=1)
    return np.asarray(holders_PRE[holders_PRE.any(axis=1).all(axis=1)])
