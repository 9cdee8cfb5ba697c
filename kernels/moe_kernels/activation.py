"""The non-linear middle of an expert: gate and up projections in, one vector out.

The two are plain values, so that a model's description can name one without torch: nothing of an
implementation is imported before `gated` is called.
Neighbours: `grouped_gemm` and the dense layers of a model call `gated`.

Letters: R rows, I intermediate, T tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_kernels.implementation import implemented

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Silu:
    """silu(gate) · up."""


@dataclass(frozen=True)
class SwigluOai:
    """gate · σ(alpha · gate) · (up + 1) with gate ≤ limit and −limit ≤ up ≤ limit (gpt-oss)."""

    limit: float = 7.0
    alpha: float = 1.702


Activation = Silu | SwigluOai

SILU = Silu()


@implemented
def gated(both_R2I: Tensor, act: Activation) -> Tensor:
    """[R, I] of [R, 2·I], the gate projection in columns 0:I and the up projection in I:2I.

    Float32. A NaN in either half makes its element NaN; infinities follow the formula in IEEE
    arithmetic, with e^x infinite from x = 88 on at the latest allowed.
    """
    from moe_kernels.reference import activation as reference

    return reference.gated(both_R2I, act)


@implemented
def sigmoid_scaled(x_TH: Tensor, logits_T1: Tensor) -> Tensor:
    """x · σ(logit) by the row, float32 [T, H], computed as x ÷ (1 + e^−logit)."""
    from moe_kernels.reference import activation as reference

    return reference.sigmoid_scaled(x_TH, logits_T1)
