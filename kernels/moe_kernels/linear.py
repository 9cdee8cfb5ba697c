"""Matrix product whose rows do not know their neighbours.

A library product picks its algorithm by the number of rows, so a row's last bits change with its
batch. Here a row's result depends on neither its place nor on what shares the call.
Neighbours: `grouped_gemm` does the same per expert; `norm_rope` and `paged_attention` are the rest
of a layer.

Letters: T rows, H inputs, O outputs.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.implementation import implemented
from moe_kernels.reference import linear as reference


@implemented
def linear(x_TH: Tensor, w_OH: Tensor) -> Tensor:
    """x · wᵀ as float32 [T, O].

    `x_TH` is float32 and is rounded to the dtype of `w_OH` (float32, bfloat16 or float16); both are
    then widened, products are summed in float32. T may be 0. A NaN in a row of x reaches every
    output of that row and of no other; infinities and overflow follow IEEE arithmetic.
    """
    return reference.linear(x_TH, w_OH)
