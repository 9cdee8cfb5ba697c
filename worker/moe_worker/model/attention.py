"""What attention is to a layer: from the residual stream to the residual stream.

Each kind norms its input, writes this step's tokens into the layer's pages, reads them back with
all earlier ones and adds what comes out. Neighbours: `grouped_query` and `mla` are the kinds,
`attention_kinds` chooses, `transformer` calls one per layer.

Letters: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.kv_pages import KvPages


class Attention(Protocol):
    def __call__(self, x_TH: Tensor, pages: KvPages, step: AttentionStep, /) -> Tensor:
        """Float32 [T, H], new, of float32 hidden states; T may be 0."""
        ...
