"""The choice of experts on the CPU: one pass over a token's scores that keeps the best K in order.

No sort: a token has some hundred scores and few of them reach the list. Comparisons are those of a
stable sort in falling order with NaN before every number, so among equals the lowest id stays.
Neighbours: `moe_kernels.router` is the contract; `gate` calls `choose_rows` with logits of its own.

Letters: T tokens, E logical experts, K choices a token, G groups.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_kernels.cpu.activation import whole_exponential
from moe_kernels.cpu.apart import Slot, call_apart
from moe_kernels.cpu.arrays import float32_array
from moe_kernels.cpu.jit import Array, Index, compiled
from moe_kernels.router import RouterSpec, check_fit

_SOFTMAX, _SIGMOID, _SOFTMAX_TOPK = 0, 1, 2
_SCORES = {"softmax": _SOFTMAX, "sigmoid": _SIGMOID, "softmax_topk": _SOFTMAX_TOPK}
_ONE, _LOWEST = np.float32(1.0), np.float32(-np.inf)
NO_BIAS = np.empty(0, np.float32)


class RouterNumbers(NamedTuple):
    """A router as kernels take it."""

    score: int
    num_groups: int
    """0 where there are no groups."""
    keep: int
    two_best: bool
    """A group's score is the sum of its two best."""
    renorm: bool
    epsilon: np.float32
    scale: np.float32


def router_numbers(spec: RouterSpec) -> RouterNumbers:
    groups = spec.groups
    return RouterNumbers(
        _SCORES[spec.score],
        0 if groups is None else groups.num,
        0 if groups is None else groups.keep,
        groups is not None and groups.reduce == "top2sum",
        spec.renorm,
        np.float32(spec.renorm_epsilon),
        np.float32(spec.scale),
    )


def choose_experts(
    logits_TE: Tensor, spec: RouterSpec, selection_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    check_fit(logits_TE.shape[1], spec, selection_bias_E)
    CHOOSING.fill()
    ids_TK = torch.empty((logits_TE.shape[0], spec.top_k), dtype=torch.int64)
    weights_TK = torch.empty(ids_TK.shape, dtype=torch.float32)
    choose_rows(
        float32_array(logits_TE.to(torch.float32)),
        NO_BIAS if selection_bias_E is None else float32_array(selection_bias_E),
        *router_numbers(spec),
        0,
        len(logits_TE),
        ids_TK.numpy(),
        weights_TK.numpy(),
    )
    return ids_TK, weights_TK


@compiled
def choose_rows(
    logits_TE: Array,
    bias_E: Array,
    score: int,
    num_groups: int,
    keep: int,
    two_best: bool,
    renorm: bool,
    epsilon: np.float32,
    scale: np.float32,
    first: Index,
    last: Index,
    ids_TK: Array,
    weights_TK: Array,
) -> None:
    """Rows first:last of `ids_TK` and `weights_TK`; the bias is empty where there is none.

    `CHOOSING.fill()` comes before the first call.
    """
    call_apart(
        "choose", logits_TE, bias_E, score, num_groups, keep, two_best, renorm, epsilon, scale,
        first, last, ids_TK, weights_TK,
    )  # fmt: skip


def _choose(
    logits_TE: Array,
    bias_E: Array,
    score: int,
    num_groups: int,
    keep: int,
    two_best: bool,
    renorm: bool,
    epsilon: np.float32,
    scale: np.float32,
    first: Index,
    last: Index,
    ids_TK: Array,
    weights_TK: Array,
) -> None:
    scores_E, ranking_E = np.empty_like(logits_TE[0]), np.empty_like(logits_TE[0])
    group_scores_G, kept_G = np.empty(num_groups, np.float32), np.empty(keep, np.int64)
    for row in range(first, last):
        _score_row(logits_TE[row], score, scores_E)
        ranking_E[:] = scores_E
        if bias_E.size > 0:
            for expert in range(bias_E.size):
                ranking_E[expert] += bias_E[expert]
        if num_groups > 0:
            _drop_groups(ranking_E, two_best, group_scores_G, kept_G)
        _take_best(ranking_E, ids_TK[row])
        _weigh(scores_E, ids_TK[row], score, renorm, epsilon, scale, weights_TK[row])


_NUMBERS = [*[types.int64] * 3, *[types.boolean] * 2, *[types.float32] * 2]
_ROWS = types.Array(types.float32, 2, "C")
CHOOSING = Slot(
    "choose",
    _choose,
    [
        _ROWS,
        types.Array(types.float32, 1, "C"),
        *_NUMBERS,
        *[types.int64] * 2,
        types.Array(types.int64, 2, "C"),
        _ROWS,
    ],
)


@compiled
def _score_row(logits_E: Array, score: int, scores_E: Array) -> None:
    if score == _SOFTMAX:
        _powers(logits_E, scores_E)
        total = np.float32(0.0)
        for expert in range(scores_E.size):
            total += scores_E[expert]
        for expert in range(scores_E.size):
            scores_E[expert] /= total
    elif score == _SIGMOID:
        for expert in range(scores_E.size):
            scores_E[expert] = _ONE / (_ONE + whole_exponential(-logits_E[expert]))
    else:
        scores_E[:] = logits_E


@compiled
def _powers(x_N: Array, y_N: Array) -> None:
    """y = e^(x − the greatest x); all NaN where one is."""
    greatest = _LOWEST
    for n in range(x_N.size):
        x = x_N[n]
        greatest = x if x > greatest or x != x else greatest
    for n in range(x_N.size):
        y_N[n] = whole_exponential(x_N[n] - greatest)


@compiled
def _is_before(x: np.float32, other: np.float32) -> bool:
    """In falling order with NaN first; False among equals."""
    return other == other and not x <= other


@compiled
def _take_best(values_N: Array, best_K: Array) -> None:
    """Indices of the K first values in that order, the lower index first among equals."""
    most = best_K.size
    found = 0
    for n in range(values_N.size):
        value = values_N[n]
        if found == most and not _is_before(value, values_N[best_K[most - 1]]):
            continue
        place = min(found, most - 1)
        while place > 0 and _is_before(value, values_N[best_K[place - 1]]):
            best_K[place] = best_K[place - 1]
            place -= 1
        best_K[place] = n
        found = min(found + 1, most)


@compiled
def _drop_groups(ranking_E: Array, two_best: bool, scores_G: Array, kept_G: Array) -> None:
    """−∞ for experts outside the best groups."""
    size = ranking_E.size // scores_G.size
    for group in range(scores_G.size):
        members = ranking_E[group * size : (group + 1) * size]
        best, second = members[0], _LOWEST
        for member in range(1, size):
            value = members[member]
            if _is_before(value, best):
                best, second = value, best
            elif member == 1 or _is_before(value, second):
                second = value
        scores_G[group] = best + second if two_best and size > 1 else best
    _take_best(scores_G, kept_G)
    for group in range(scores_G.size):
        is_kept = False
        for kept in kept_G:
            is_kept = is_kept or kept == group
        if not is_kept:
            ranking_E[group * size : (group + 1) * size] = _LOWEST


@compiled
def _weigh(
    scores_E: Array,
    ids_K: Array,
    score: int,
    renorm: bool,
    epsilon: np.float32,
    scale: np.float32,
    weights_K: Array,
) -> None:
    for choice in range(ids_K.size):
        weights_K[choice] = scores_E[ids_K[choice]]
    if score == _SOFTMAX_TOPK:
        _powers(weights_K, weights_K)
    if score == _SOFTMAX_TOPK or renorm:
        total = weights_K[0]
        for choice in range(1, ids_K.size):
            total += weights_K[choice]
        if score != _SOFTMAX_TOPK and epsilon != 0:
            total += epsilon
        for choice in range(ids_K.size):
            weights_K[choice] /= total
    if scale != _ONE:
        for choice in range(ids_K.size):
            weights_K[choice] *= scale
