"""Which attention a model's description asks for. Neighbours: `grouped_query`, `mla`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from moe_worker.model.attention import Attention
from moe_worker.model.grouped_query import GroupedQueryAttention
from moe_worker.model.mla import LatentAttention
from moe_worker.model.spec import AttentionSpec, LatentSpec, ModelSpec

_KINDS: dict[type[AttentionSpec | LatentSpec], Callable[..., Attention]] = {
    AttentionSpec: GroupedQueryAttention,
    LatentSpec: LatentAttention,
}


def build_attention(
    spec: ModelSpec, layer: int, norm_H: Tensor, weights: Mapping[str, Tensor]
) -> Attention:
    """The attention of model layer `layer` with its input's norm; `weights` by role."""
    return _KINDS[type(spec.attention)](spec, layer, norm_H, weights)
