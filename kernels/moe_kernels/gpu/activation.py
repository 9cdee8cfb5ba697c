"""The middle of an expert, element by element: [R, 2·I] → [R, I].

A program takes SIZE elements of the output, wherever they lie: nothing is summed, so nothing can
depend on the company. `gate_up` is also called by `grouped_gemm` on tiles that are in registers.
Neighbour: `moe_kernels.activation` is the contract.

Letters: R rows, I intermediate.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.activation import Activation, Silu
from moe_kernels.gpu.jit import SAFE, blocks, compiled, compiled_for_any
from moe_kernels.gpu.numbers import exponential

SIZE = 1024


def gated(both_R2I: Tensor, act: Activation) -> Tensor:
    both_R2I = both_R2I.contiguous()
    rows, intermediate = both_R2I.shape[0], both_R2I.shape[1] // 2
    inner_RI = torch.empty((rows, intermediate), dtype=torch.float32, device=both_R2I.device)
    if inner_RI.numel():
        gate_elements[(blocks(inner_RI.numel(), SIZE),)](
            both_R2I, inner_RI, inner_RI.numel(), intermediate, *parameters(act), SIZE=SIZE, **SAFE
        )
    return inner_RI


def parameters(act: Activation) -> tuple[bool, float, float]:
    """IS_SILU, limit, alpha."""
    if isinstance(act, Silu):
        return True, 0.0, 0.0
    return False, float(act.limit), float(act.alpha)


@compiled_for_any("count")
def gate_elements(
    both_R2I: tl.tensor,
    inner_RI: tl.tensor,
    count: tl.tensor,
    intermediate: tl.tensor,
    IS_SILU: tl.constexpr,
    limit: tl.tensor,
    alpha: tl.tensor,
    SIZE: tl.constexpr,
) -> None:
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    row, column = at // intermediate, at % intermediate
    gate = tl.load(both_R2I + row * (2 * intermediate) + column, mask=at < count, other=0.0)
    up = tl.load(
        both_R2I + row * (2 * intermediate) + intermediate + column, mask=at < count, other=0.0
    )
    tl.store(inner_RI + at, gate_up(gate, up, IS_SILU, limit, alpha), mask=at < count)


@compiled
def gate_up(
    gate: tl.tensor, up: tl.tensor, IS_SILU: tl.constexpr, limit: tl.tensor, alpha: tl.tensor
) -> tl.tensor:
    if IS_SILU:
        inner = tl.div_rn(gate, 1.0 + exponential(-gate)) * up
    else:
        # Comparisons, as the minimum of a number and NaN is the number.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        inner = tl.div_rn(gate, 1.0 + exponential(-alpha * gate)) * (up + 1.0)
    return inner
