"""What attention is to a layer: from normed hidden states to what is added to the residual stream.

Each kind writes this step's tokens into the layer's pages and then reads them back with all earlier
ones. Neighbours: `grouped_query` and `mla` are the kinds, `attention_kinds` chooses, `transformer`
calls one per layer.

Letters: T tokens, H hidden, F rotated pairs.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.kv_pages import KvPages

Rotation = tuple[Tensor, Tensor]
"""cos and sin of this step's tokens, float32 [T, F] each."""


class AttentionStep(Protocol):
    """What attention reads of a batch."""

    @property
    def positions_T(self) -> Tensor: ...
    @property
    def slots_T(self) -> Tensor: ...
    @property
    def attention(self) -> AttentionPlan: ...


class Attention(Protocol):
    def __call__(
        self, x_TH: Tensor, pages: KvPages, batch: AttentionStep, rotation: Rotation, /
    ) -> Tensor:
        """Float32 [T, H] for normed float32 input of at least one token."""
        ...
