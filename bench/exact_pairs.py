"""The exact optimum of an even split where every rank has two slots and experts are few (Mixtral).

For each number of copies of each expert the best pairing without the rule "no expert twice on a
rank" is folding: heaviest with lightest. That value is a bound; candidates are taken in its order,
and the first whose copies can really be paired below the best one found so far ends the search.
Neighbours: `placement` prints it as the bound of shape a, tests hold the planner against it.

Shapes: E logical experts, R ranks, V vectors of copy numbers, C copies (2 R, free slots weigh 0).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

FREE = -1


def best_even_level(load_E: npt.NDArray[np.float64], num_ranks: int) -> float:
    """Smallest largest rank load of an even split over `num_ranks` ranks with two slots each."""
    expert_VC = _candidates(len(load_E), num_ranks)
    counts_VC = _counts(len(load_E), num_ranks)
    weight_VC = np.where(expert_VC == FREE, 0.0, load_E[expert_VC] / counts_VC)
    ordered_VC = np.sort(weight_VC, axis=1)
    folded_V = (ordered_VC[:, :num_ranks] + ordered_VC[:, : num_ranks - 1 : -1]).max(axis=1)
    best = np.inf
    for row in np.argsort(folded_V, kind="stable").tolist():
        if folded_V[row] >= best:
            break
        best = min(best, _best_pairing(weight_VC[row], expert_VC[row], folded_V[row]))
    return float(best)


def _best_pairing(
    weight_C: npt.NDArray[np.float64], expert_C: npt.NDArray[np.int64], at_least: float
) -> float:
    """Smallest largest pair when no pair holds an expert twice: the smallest sum of two copies, not
    below `at_least`, for which a perfect matching exists."""
    order = np.argsort(-weight_C, kind="stable")
    weight, expert = weight_C[order], expert_C[order]
    sums = weight[:, None] + weight[None, :]
    apart = (expert[:, None] != expert[None, :]) | (expert[:, None] == FREE)
    for level in np.unique(sums[apart & (sums >= at_least * (1 - 1e-12))]).tolist():
        allowed = apart & (sums <= level * (1 + 1e-12))
        if _matches(allowed, frozenset(range(len(weight)))):
            return float(level)
    return np.inf


def _matches(allowed: npt.NDArray[np.bool_], left: frozenset[int]) -> bool:
    """Whether all of `left` can be paired: the heaviest tries its partners, heaviest first."""
    if not left:
        return True
    first = min(left)
    rest = left - {first}
    tried: set[bytes] = set()  # partners with equal rows are the same choice
    for partner in sorted(rest):
        key = allowed[partner].tobytes()
        if allowed[first, partner] and key not in tried:
            tried.add(key)
            if _matches(allowed, rest - {partner}):
                return True
    return False


@cache
def _candidates(num_experts: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """Every multiset of copies that fills at most 2 R slots with each expert 1 to R times: the
    expert of each copy [V, C]."""
    rows = [
        [expert for expert, count in enumerate(counts) for _ in range(count)]
        for counts in _copy_numbers(num_experts, 2 * num_ranks, num_ranks)
    ]
    return np.asarray([row + [FREE] * (2 * num_ranks - len(row)) for row in rows], dtype=np.int64)


@cache
def _counts(num_experts: int, num_ranks: int) -> npt.NDArray[np.int64]:
    """How often the expert of each copy occurs in its vector, 1 for free slots."""
    expert_VC = _candidates(num_experts, num_ranks)
    same = (expert_VC[:, :, None] == expert_VC[:, None, :]).sum(axis=2)
    return np.where(expert_VC == FREE, 1, same)


def _copy_numbers(num_experts: int, room: int, most: int) -> list[tuple[int, ...]]:
    if num_experts == 0:
        return [()]
    return [
        (count, *rest)
        for count in range(1, min(most, room - num_experts + 1) + 1)
        for rest in _copy_numbers(num_experts - 1, room - count, most)
    ]
