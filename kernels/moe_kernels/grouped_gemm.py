"""The experts of one layer on one rank: a gated network per slot over the rows sorted to it.

Neighbours: `permute.sort_by_slot` makes the groups; `linear` is the product and its rounding;
`activation` is the middle of the network. A row's result depends on neither how many rows its
expert got nor on the slot the expert lives in.

Letters: P rows, S slots, H hidden, I expert intermediate.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.implementation import implemented
from moe_kernels.reference import grouped_gemm as reference


@implemented
def expert_mlp(
    rows_PH: Tensor,
    offsets: Tensor,
    w13_S2IH: Tensor,
    w2_SHI: Tensor,
    *,
    act: Activation = SILU,
    b13_S2I: Tensor | None = None,
    b2_SH: Tensor | None = None,
) -> Tensor:
    """w2 · act(w1 · x + b1, w3 · x + b3) + b2 per row with its slot's weights, float32 [P, H],
    unsummed.

    `rows_PH` float32, sorted by slot; `offsets` [S+1] int64: slot s owns rows
    offsets[s]:offsets[s+1]; rows past offsets[S] belong to no slot and come back zero.
    `w13_S2IH` holds w1 (gate) in rows 0:I and w3 (up) in I:2I, `b13_S2I` likewise; both biases or
    none. Rounding as in `linear`; biases are added in float32. A NaN in a row makes that whole
    row NaN and no other.
    """
    return reference.expert_mlp(
        rows_PH, offsets, w13_S2IH, w2_SHI, act=act, b13_S2I=b13_S2I, b2_SH=b2_SH
    )
