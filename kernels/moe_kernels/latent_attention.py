"""Multi-head latent attention (MLA) over pages that hold a latent and one rotated key per token.

A head's key is W_K · latent beside the rotated key that all heads share, its value W_V · latent.
Neither is built: W_K moves to the query's side of the product and W_V behind the sum of values
("absorbed"), which leaves attention of all heads over one key of latent and rotated part.
The products with W_K and W_V run over tiles of a fixed number of rows, like `linear`, so that a
token's result does not depend on its batch.
Neighbours: `paged_attention` is what lies between them, `kv_pages` keeps the latents,
`moe_worker.model.mla` makes queries and latents.

Letters: T tokens, P rows padded to whole tiles, N heads, C elements of a head that are not rotated,
R rotated ones, D latent, V value of a head, I inputs and O outputs of a head's product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.kv_pages import KvPages
from moe_kernels.paged_attention import paged_attention
from moe_kernels.reference.linear import TILE_ROWS, num_tiles, widened


def latent_attention(
    q_TNC: Tensor,
    q_rope_TNR: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    *,
    w_k_NCD: Tensor,
    w_v_NVD: Tensor,
    scale: float,
) -> Tensor:
    """Every head over its keys up to the query's own position, float32 [T, N, V].

    The step's own latents must lie in the pages (`LatentShape(D, R)`) already.

    Args:
        q_TNC: float32, not rotated part of the queries; `q_rope_TNR` the rotated part.
        w_k_NCD, w_v_NVD: of each head, float32, bfloat16 or float16; rounding as in `linear`.
        scale: multiplies q · k.
    """
    q_latent_TND = head_linear(q_TNC, w_k_NCD.transpose(1, 2))
    q_TNX = torch.cat((q_latent_TND, q_rope_TNR), dim=-1)
    mixed_TND = paged_attention(q_TNX, pages, plan, scale=scale)
    return head_linear(mixed_TND, w_v_NVD)


def head_linear(x_TNI: Tensor, w_NOI: Tensor) -> Tensor:
    """Each head's x · wᵀ as float32 [T, N, O]; dtypes and rounding as in `linear.linear`."""
    num_rows, num_heads, width = x_TNI.shape
    w_NIO = widened(w_NOI.transpose(1, 2))
    rounded = x_TNI if w_NOI.dtype == torch.float32 else x_TNI.to(w_NOI.dtype)
    x_NPI = x_TNI.new_zeros((num_heads, num_tiles(num_rows) * TILE_ROWS, width))
    x_NPI[:, :num_rows] = rounded.transpose(0, 1)
    y_PNO = x_TNI.new_empty((x_NPI.shape[1], num_heads, w_NOI.shape[1]))
    for start in range(0, x_NPI.shape[1], TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        y_PNO[tile] = torch.bmm(x_NPI[:, tile].contiguous(), w_NIO).transpose(0, 1)
    return y_PNO[:num_rows]
