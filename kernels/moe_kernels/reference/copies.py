"""The choice of copies in torch; `moe_kernels.copies` is the contract.

Letters: T tokens, K choices a token, E logical experts, C copies of one expert at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from moe_kernels.copies import Copies


def place_choices(
    ids_TK: Tensor, copies: Copies, sent_E: Tensor, turn: int
) -> tuple[Tensor, Tensor, int]:
    num_experts, num_copies = copies.physical_EC.shape
    valid_TK = (ids_TK >= 0) & (ids_TK < num_experts)
    num_strangers = int((~valid_TK & (ids_TK != -1)).sum())
    # Strangers are looked up as expert 0 and masked afterwards: never an index of their own.
    safe_TK = torch.where(valid_TK, ids_TK, 0)
    chosen_E = torch.bincount(ids_TK[valid_TK], minlength=num_experts)
    if num_copies == 1:
        physical_TK = copies.physical_EC[:, 0][safe_TK]
    else:
        place_TK = _occurrence(ids_TK, valid_TK, num_experts) + turn
        n_TK = sent_E[safe_TK] + place_TK % chosen_E[safe_TK].clamp(min=1)
        point_TK = _points(n_TK, copies.start_E[safe_TK])
        copy_TK = (point_TK[..., None] >= copies.edges_EC[safe_TK]).sum(dim=-1)
        physical_TK = copies.physical_EC[safe_TK, copy_TK]
    return torch.where(valid_TK, physical_TK, -1), chosen_E, num_strangers


def _points(n: Tensor, start: Tensor) -> Tensor:
    """The highest bits of the wrapped product, as an int64 ≥ 0."""
    from moe_kernels.copies import GOLDEN, POINT_BITS

    return (n * GOLDEN + start >> (64 - POINT_BITS)) & ((1 << POINT_BITS) - 1)


def _occurrence(ids_TK: Tensor, valid_TK: Tensor, num_experts: int) -> Tensor:
    """For each choice, how many earlier ones in the batch name the same expert, int64 [T, K]."""
    flat = torch.where(valid_TK, ids_TK, num_experts).reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts + 1)
    first = torch.cumsum(counts, dim=0) - counts
    place = torch.empty_like(flat)
    place[order] = torch.arange(flat.numel(), device=flat.device) - first[flat[order]]
    return place.reshape(ids_TK.shape)
