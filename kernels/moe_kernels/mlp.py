"""The dense gated networks of a model: layers without experts, and experts that all tokens share.

Neighbours: `linear` and `activation` are the parts; `experts` adds a shared one to routed experts.

Letters: T tokens, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_kernels.activation import SILU, Activation, gated, sigmoid_scaled
from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.linear import linear


@dataclass(frozen=True, eq=False)
class Mlp:
    """A network's weights, of one dtype; they never change, views of them are kept."""

    w13_2IH: Tensor
    """w1 (gate projection) in rows 0:I, w3 (up) in rows I:2I."""
    w2_HI: Tensor
    act: Activation = SILU
    gate_1H: Tensor | None = None
    """The output is multiplied by the sigmoid of gate · x."""
    derived: Derived = field(default_factory=Derived)


@implemented
def mlp(x_TH: Tensor, weights: Mlp) -> Tensor:
    """w2 · act(w1 · x, w3 · x), float32 [T, H], with a gate times σ(gate · x).

    Rounding and what comes of a NaN as in `linear`.
    """
    out_TH = linear(gated(linear(x_TH, weights.w13_2IH), weights.act), weights.w2_HI)
    if weights.gate_1H is None:
        return out_TH
    return sigmoid_scaled(out_TH, linear(x_TH, weights.gate_1H))


@implemented
def add_mlp(onto_TH: Tensor, x_TH: Tensor, weights: Mlp, multiplier: float = 1.0) -> Tensor:
    """onto + multiplier · mlp(x), a new tensor."""
    out_TH = mlp(x_TH, weights)
    return onto_TH + (out_TH if multiplier == 1.0 else out_TH * multiplier)
