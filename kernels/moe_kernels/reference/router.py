"""The choice of experts with torch's stable sort.

Neighbour: `moe_kernels.router` is the contract and says what comes of logits that are no numbers.

Letters: T tokens, E logical experts, K choices a token, G groups, M experts of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.router import ExpertGroups, RouterSpec


def choose_experts(
    logits_TE: Tensor, spec: RouterSpec, selection_bias_E: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    scores_TE = _scores(logits_TE.to(torch.float32), spec)
    ranking_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
    if spec.groups is not None:
        ranking_TE = _within_best_groups(ranking_TE, spec.groups)
    ordered_TE, order_TE = torch.sort(ranking_TE, dim=1, descending=True, stable=True)
    ids_TK = order_TE[:, : spec.top_k].contiguous()
    if ranking_TE is scores_TE:
        # Contiguous: an exponential of a strided row may be rounded otherwise than of a dense one.
        chosen_TK = ordered_TE[:, : spec.top_k].contiguous()
    else:
        chosen_TK = scores_TE.gather(1, ids_TK)
    return ids_TK, _weights(chosen_TK, spec)


def _scores(logits_TE: Tensor, spec: RouterSpec) -> Tensor:
    if spec.score == "softmax":
        return torch.softmax(logits_TE, dim=1)
    if spec.score == "sigmoid":
        # Spelled out: the library's sigmoid rounds its vector body and its tail differently.
        return 1.0 / (1.0 + torch.exp(-logits_TE))
    return logits_TE


def _within_best_groups(ranking_TE: Tensor, groups: ExpertGroups) -> Tensor:
    """The same with −inf for experts outside each token's `keep` best groups."""
    num_experts = ranking_TE.shape[1]
    grouped_TGM = ranking_TE.view(-1, groups.num, num_experts // groups.num)
    if groups.reduce == "max":
        score_TG = grouped_TGM.amax(dim=2)
    else:
        best_TGM = grouped_TGM.sort(dim=2, descending=True).values
        score_TG = best_TGM[:, :, 0]
        if best_TGM.shape[2] > 1:
            score_TG = score_TG + best_TGM[:, :, 1]
    order_TG = torch.sort(score_TG, dim=1, descending=True, stable=True).indices
    dropped_TG = torch.ones_like(score_TG, dtype=torch.bool)
    dropped_TG.scatter_(1, order_TG[:, : groups.keep], False)
    return grouped_TGM.masked_fill(dropped_TG[:, :, None], -torch.inf).view_as(ranking_TE)


def _weights(chosen_TK: Tensor, spec: RouterSpec) -> Tensor:
    """Of the chosen scores, in the order softmax over them, renormalised, scaled."""
    if spec.score == "softmax_topk":
        # The best comes first: it is the maximum that keeps the exponentials in range.
        chosen_TK = (chosen_TK - chosen_TK.amax(dim=1, keepdim=True)).exp()
        chosen_TK = chosen_TK / _row_sums(chosen_TK)
    elif spec.renorm:
        total_T1 = _row_sums(chosen_TK)
        chosen_TK = chosen_TK / (
            total_T1 + spec.renorm_epsilon if spec.renorm_epsilon else total_T1
        )
    return chosen_TK if spec.scale == 1.0 else chosen_TK * spec.scale


def _row_sums(x_TK: Tensor) -> Tensor:
    """[T, 1], column by column: the order in which `sum` adds may change with the rows."""
    total_T1 = x_TK[:, :1].clone()
    for column in range(1, x_TK.shape[1]):
        total_T1 += x_TK[:, column : column + 1]
    return total_T1
