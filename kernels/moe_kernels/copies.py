"""Which copy of a chosen expert serves a token.

An expert's n-th token takes the point frac(n ÷ φ + start) of the unit interval, and the copy whose
share covers it: any N tokens in a row are split as the shares say, up to O(log N). Within a batch
an expert's points are dealt out to its tokens with a turn, so that no place in the batch is tied to
a copy. Integers throughout: every implementation gives the same answer.
Neighbours: the worker's routing table makes the shares and starts from a plan; `permute` sorts what
comes out.

Letters: T tokens, K choices a token, E logical experts, C copies of one expert at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.reference import copies as reference

POINT_BITS = 32
"""Points and shares are in units of 2 to the minus that."""
GOLDEN = -7046029254386353131
"""2⁶⁴ ÷ φ as a wrapped int64: n · this, top 32 bits, is frac(n ÷ φ) in units of 2⁻³²."""


@dataclass(frozen=True, eq=False)
class Copies:
    """Where the experts of one layer are. The tensors never change, views of them are kept."""

    physical_EC: Tensor
    """int64 physical expert of each copy, −1 past the last."""
    edges_EC: Tensor
    """int64, upper end of each copy's share in units of 2⁻³²; the last one is 2³²."""
    start_E: Tensor
    """int64, where the sequence of points begins, in units of 2⁻⁶⁴."""
    derived: Derived = field(default_factory=Derived)


@implemented
def place_choices(
    ids_TK: Tensor, copies: Copies, sent_E: Tensor, turn: int
) -> tuple[Tensor, Tensor, int]:
    """Physical expert of each choice, how many tokens each expert got, how many ids name none.

    Args:
        ids_TK: int64 logical ids; −1 (legal) and ids outside 0 ≤ id < E (strangers) map to −1.
        sent_E: int64, tokens sent to each expert before: the next one's n.
        turn: 0 ≤ turn < 2⁶².

    Returns (int64 [T, K], int64 [E], number of strangers, −1 not among them).
    """
    return reference.place_choices(ids_TK, copies, sent_E, turn)
