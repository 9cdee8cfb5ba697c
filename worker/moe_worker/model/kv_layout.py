"""Which KV format and shape a model's cache has, and the bytes of a token. No torch.

Neighbours: `spec` describes the model, `moe_kernels.kv_formats` the formats,
`moe_worker.engine.kv` sizes and allocates the cache.
"""

from __future__ import annotations

from moe_api.worker import KvConfig
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName, KvShape, LatentShape
from moe_worker.model.spec import DtypeName, LatentSpec, ModelSpec

_FORMAT_OF_DTYPE: dict[DtypeName, KvFormatName] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
}


def kv_shape(model: ModelSpec) -> KvShape:
    """What a layer keeps of a token."""
    attention = model.attention
    if isinstance(attention, LatentSpec):
        return LatentShape(attention.latent_dim, attention.rope_dim)
    return HeadsShape(attention.num_kv_heads, attention.head_dim)


def kv_format(model: ModelSpec, kv: KvConfig) -> KvFormat:
    """The format in force; "auto" is the dtype that the model's weights are held in."""
    name = _FORMAT_OF_DTYPE[model.dtype] if kv.dtype == "auto" else kv.dtype
    return KvFormat(name, kv.encoding)


def kv_bytes_per_token(model: ModelSpec, kv: KvConfig) -> int:
    """All layers, keys and values; raises KvFormatError when the format cannot hold the shape."""
    return model.num_layers * kv_format(model, kv).bytes_per_token(kv_shape(model))
