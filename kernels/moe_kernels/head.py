"""The two ends of a model: token ids to rows, and rows to logits.

Neighbours: `norm_rope` and `linear` are the parts; a model calls `embed` first and `head_logits`
last.

Letters: T tokens, H hidden, V vocabulary, B rows that are sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels.derived import Derived
from moe_kernels.implementation import implemented
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm


@dataclass(frozen=True, eq=False)
class Embedding:
    """The tensor never changes, a view of it is kept."""

    rows_VH: Tensor
    multiplier: float = 1.0
    derived: Derived = field(default_factory=Derived)


@dataclass(frozen=True, eq=False)
class Head:
    """The tensors never change, views of them are kept."""

    norm_H: Tensor
    norm_eps: float
    rows_VH: Tensor
    divisor: float = 1.0
    """Of the logits."""
    derived: Derived = field(default_factory=Derived)


@implemented
def embed(ids_T: Tensor, embedding: Embedding) -> Tensor:
    """The rows of int64 ids, times the multiplier, float32 [T, H].

    Raises:
        IndexError: an id is none of the vocabulary's.
    """
    x_TH = embedding.rows_VH[ids_T].to(torch.float32)
    return x_TH if embedding.multiplier == 1.0 else x_TH * embedding.multiplier


@implemented
def head_logits(x_TH: Tensor, rows_B: Tensor, head: Head) -> Tensor:
    """Logits float32 [B, V] of the rows of `x_TH` that the int64 `rows_B` names.

    Bit for bit `linear` of `rms_norm`, divided by the divisor.

    Raises:
        IndexError: there is no such row.
    """
    logits_BV = linear(rms_norm(x_TH[rows_B], head.norm_H, head.norm_eps), head.rows_VH)
    return logits_BV if head.divisor == 1.0 else logits_BV / head.divisor
