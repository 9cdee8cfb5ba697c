"""The experts' half of a layer in one call, where all chosen experts are on this rank.

Neighbours: `gate` gives rows, choices and weights; `permute`, `grouped_gemm` and `mlp` are the
parts. Where experts are spread over ranks the dispatcher takes the parts one by one, with the
exchange between them and the same sums: the numbers do not depend on where experts live.

Letters: T tokens, K choices a token, S slots, H hidden, I expert intermediate, P pairs (token,
choice) with a slot.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.derived import Derived
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.implementation import implemented
from moe_kernels.mlp import Mlp
from moe_kernels.reference import experts as reference


@dataclass(frozen=True, eq=False)
class Experts:
    """A layer's slots as `expert_mlp` takes them, contiguous; numbers may be written into them,
    but they stay where they are: views are kept."""

    w13_S2IH: Tensor
    w2_SHI: Tensor
    act: Activation = SILU
    b13_S2I: Tensor | None = None
    b2_SH: Tensor | None = None
    derived: Derived = field(default_factory=Derived)

    def run(self, rows_PH: Tensor, offsets: Tensor) -> Tensor:
        """`expert_mlp` of rows that are sorted by slot."""
        return expert_mlp(
            rows_PH,
            offsets,
            self.w13_S2IH,
            self.w2_SHI,
            act=self.act,
            b13_S2I=self.b13_S2I,
            b2_SH=self.b2_SH,
        )


@implemented
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
    """onto + multiplier · (Σ weight · expert(x) + shared(x)), and how many rows each slot got.

    A token's experts are added in the order of its choices, each multiplied first, in float32 and
    starting from zero. A choice whose slot is −1 or none of the S adds a zero.

    Args:
        onto_TH: float32; absent: nothing is added to.
        x_TH: float32.
        slots_TK: int64.
        weights_TK: float32.
        shared: an expert of all tokens, of the same activation and dtype.

    Returns (float32 [T, H], a new tensor; int64 [S]).
    """
    return reference.add_experts(
        onto_TH, x_TH, slots_TK, weights_TK, experts, shared=shared, multiplier=multiplier
    )
