"""Which experts a token goes to and with what weights.

The gate's logits come from `moe_kernels.linear` in `layer`; `routing_table` then says where the
chosen experts live. Everything here is per row and in a fixed order of additions, so a token's
choice does not depend on what shares its batch.

Letters: T tokens, E logical experts, K choices a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


def choose_experts(logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The `top_k` most probable experts of each token, best first.

    Softmax over all experts in float32; among equals the lowest id wins. With `renormalise` the
    chosen weights are divided by their sum (Mixtral).

    Returns (ids int64 [T, K], weights float32 [T, K]).

    Raises:
        ValueError: more choices than experts.
    """
    if not 1 <= top_k <= logits_TE.shape[1]:
        raise ValueError(f"top_k {top_k} of {logits_TE.shape[1]} experts: must be 1 to all of them")
    probabilities_TE = torch.softmax(logits_TE.to(torch.float32), dim=1)
    ordered_TE, order_TE = torch.sort(probabilities_TE, dim=1, descending=True, stable=True)
    ids_TK, weights_TK = order_TE[:, :top_k], ordered_TE[:, :top_k]
    if renormalise:
        # Column by column: the order in which `sum` adds may change with the number of rows.
        total_T = weights_TK[:, 0].clone()
        for choice in range(1, top_k):
            total_T += weights_TK[:, choice]
        weights_TK = weights_TK / total_T[:, None]
    return ids_TK.contiguous(), weights_TK.contiguous()
