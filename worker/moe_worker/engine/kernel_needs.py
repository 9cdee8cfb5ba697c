"""What a model asks of the kernels, for compiling them before the worker is ready.

Neighbours: `moe_kernels.warm_up` does it; `model.spec` describes the model.
"""

from __future__ import annotations

import torch

from moe_api.worker import KvConfig
from moe_kernels.warm_up import Needs, Shapes
from moe_worker.model.families.registry import family_of
from moe_worker.model.kv_layout import kv_format, kv_shape
from moe_worker.model.spec import AttentionSpec, ModelSpec
from moe_worker.model.tensors import Stored
from moe_worker.model.weights import TORCH_DTYPES


def kernel_needs(spec: ModelSpec, kv: KvConfig | None = None) -> Needs:
    """Without `kv` nothing is said of shapes."""
    dtype = TORCH_DTYPES[spec.dtype]
    return Needs(
        dtypes=frozenset({dtype}),
        act=spec.expert.act,
        bias=spec.expert.bias,
        routers=frozenset(torch.float32 if gate.float32 else dtype for gate in _gates(spec)),
        grouped_query=frozenset({dtype} if isinstance(spec.attention, AttentionSpec) else ()),
        shapes=None if kv is None else _shapes(spec, kv),
    )


def _gates(spec: ModelSpec) -> list[Stored]:
    layers = family_of(spec.family).tensors(spec).layers
    return [gate for layer in spec.moe_layers for gate in layers[layer].router["gate"]]


def _shapes(spec: ModelSpec, kv: KvConfig) -> Shapes:
    attention = spec.attention
    windows = {attention.window(layer) for layer in range(spec.num_layers)}
    return Shapes(
        hidden=spec.hidden,
        intermediate=spec.expert.intermediate,
        num_heads=attention.num_heads,
        rotated_pairs=spec.rope.dim // 2,
        kv_format=kv_format(spec, kv),
        kv_shape=kv_shape(spec),
        block_size=kv.block_size,
        windows=frozenset(windows),
        sinks=isinstance(attention, AttentionSpec) and attention.sinks,
    )
