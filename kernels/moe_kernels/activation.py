"""The non-linear middle of an expert: gate and up projections in, one vector out.

The two are plain values, so that a model's description can name one without torch. Every step is
an element-wise call of its own: a fused kernel may round its vector body and its tail differently.
Neighbours: `grouped_gemm` and the dense layers of a model call `gated`.

Letters: R rows, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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


def gated(both_R2I: Tensor, act: Activation) -> Tensor:
    """[R, I] of [R, 2·I], the gate projection in columns 0:I and the up projection in I:2I."""
    intermediate = both_R2I.shape[1] // 2
    gate_RI, up_RI = both_R2I[:, :intermediate], both_R2I[:, intermediate:]
    if isinstance(act, Silu):
        return gate_RI / (1.0 + (-gate_RI).exp()) * up_RI
    gate_RI = gate_RI.clamp(max=act.limit)
    up_RI = up_RI.clamp(min=-act.limit, max=act.limit)
    return gate_RI / (1.0 + (-act.alpha * gate_RI).exp()) * (up_RI + 1.0)
