"""Dense networks on the CPU: the experts' kernel with a shared expert and no routed ones.

Neighbours: `moe_kernels.mlp` is the contract; `experts` is the kernel.

Letters: T tokens, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.cpu.experts import add_alone
from moe_kernels.mlp import Mlp


def mlp(x_TH: Tensor, weights: Mlp) -> Tensor:
    return add_alone(None, x_TH, weights, 1.0)


def add_mlp(onto_TH: Tensor, x_TH: Tensor, weights: Mlp, multiplier: float = 1.0) -> Tensor:
    return add_alone(onto_TH, x_TH, weights, multiplier)
