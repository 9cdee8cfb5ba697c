"""The experts' half of a layer, put together from the contracts of its parts.

Neighbours: `moe_kernels.experts` is the contract; whatever implementation is in force computes the
parts.

Letters: T tokens, K choices a token, S slots, H hidden, P pairs with a slot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from moe_kernels.mlp import Mlp, mlp
from moe_kernels.permute import sort_by_slot

if TYPE_CHECKING:
    from moe_kernels.experts import Experts


def add_experts(
    onto_TH: Tensor | None,
    x_TH: Tensor,
    slots_TK: Tensor,
    weights_TK: Tensor,
    experts: Experts,
    *,
    shared: Mlp | None = None,
    multiplier: float = 1.0,
) -> tuple[Tensor, Tensor]:
    (num_tokens, top_k), hidden = slots_TK.shape, x_TH.shape[1]
    order_P, offsets = sort_by_slot(slots_TK, experts.w13_S2IH.shape[0])
    y_PH = x_TH.new_zeros((num_tokens * top_k, hidden))
    y_PH[order_P] = experts.run(x_TH[order_P // top_k], offsets)
    y_TKH = y_PH.view(num_tokens, top_k, hidden).mul_(weights_TK[:, :, None])
    total_TH = x_TH.new_zeros((num_tokens, hidden))
    for y_TH in y_TKH.unbind(1):
        total_TH += y_TH
    if shared is not None:
        total_TH = total_TH + mlp(x_TH, shared)
    if multiplier != 1.0:
        total_TH = total_TH * multiplier
    return total_TH if onto_TH is None else onto_TH + total_TH, offsets.diff()
