"""One small call of every kernel, with the widths and types of arguments that a model's calls have.

Triton compiles for constants, so the widths are the model's own: `Needs.shapes`. Without them only
those kernels are made ready that any model uses. Keys with a center or a channel scale, from a
file of scales, are compiled in the first step.
Neighbour: `moe_kernels.warm_up` runs the steps; what is called are the contracts.
"""

from __future__ import annotations

from functools import partial

import torch

from moe_kernels.activation import gated
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.gpu.attention_work import SPLIT_KEYS
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.kv_formats import HeadsShape
from moe_kernels.kv_pages import allocate_pages, append, append_latent
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_kernels.permute import sort_by_slot
from moe_kernels.sampling import Cut, sample
from moe_kernels.warm_up import Needs, Shapes, Step

_OUTPUTS = (1 << 10, 1 << 13, 1 << 15)
"""One for each width of a product's tiles."""


def steps(needs: Needs) -> list[Step]:
    """In a fixed order, the longest first."""
    dtypes = sorted(needs.dtypes, key=str)
    products = sorted(needs.dtypes | needs.routers, key=str)
    shapes = needs.shapes
    if shapes is None:
        return [Step("sort", _sort), Step("sampling", _sample)]
    windows = sorted(shapes.windows, key=lambda window: window or 0)
    return [
        *(Step(f"attention {window or ''}".rstrip(), partial(_attention, shapes, window))
          for window in windows),
        Step("kv cache", partial(_append, shapes)),
        *(Step(f"experts {_short(dtype)}", partial(_experts, dtype, needs, shapes))
          for dtype in dtypes),
        *(Step(f"linear {_short(dtype)}", partial(_linear, dtype, shapes)) for dtype in products),
        *(Step(f"norm {_short(dtype)}", partial(_norm, dtype, shapes)) for dtype in dtypes),
        Step("rope", partial(_rope, shapes)),
        Step("activation", partial(_gate, needs, shapes.intermediate)),
        Step("sort", _sort),
        Step("sampling", _sample),
    ]  # fmt: skip


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device() -> str:
    """Without a GPU kernels are interpreted, or compiled and not run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=_device())


def _attention(shapes: Shapes, window: int | None) -> None:
    """A sequence that is cut and merged."""
    num_blocks = -(-2 * SPLIT_KEYS // shapes.block_size)
    pages = allocate_pages(
        shapes.kv_format, shapes.kv_shape, num_blocks, shapes.block_size, _device()
    )
    kv = shapes.kv_shape
    width = kv.head_dim if isinstance(kv, HeadsShape) else kv.latent_dim + kv.rope_dim
    plan = plan_attention([AttentionRows(SPLIT_KEYS, 1, range(num_blocks))], shapes.block_size)
    sinks = _zeros(shapes.num_heads) if shapes.sinks else None
    paged_attention(_zeros(1, shapes.num_heads, width), pages, plan, window=window, sinks_H=sinks)


def _append(shapes: Shapes) -> None:
    kv, slots = shapes.kv_shape, _zeros(1, dtype=torch.int64)
    pages = allocate_pages(shapes.kv_format, kv, 1, shapes.block_size, _device())
    if isinstance(kv, HeadsShape):
        x = _zeros(1, kv.kv_heads, kv.head_dim)
        append(pages, x, x, slots)
    else:
        append_latent(pages, _zeros(1, kv.latent_dim), _zeros(1, kv.rope_dim), slots)


def _experts(dtype: torch.dtype, needs: Needs, shapes: Shapes) -> None:
    hidden, intermediate = shapes.hidden, shapes.intermediate
    expert_mlp(
        _zeros(1, hidden),
        torch.tensor([0, 1], device=_device()),
        _zeros(1, 2 * intermediate, hidden, dtype=dtype),
        _zeros(1, hidden, intermediate, dtype=dtype),
        act=needs.act,
        b13_S2I=_zeros(1, 2 * intermediate, dtype=dtype) if needs.bias else None,
        b2_SH=_zeros(1, hidden, dtype=dtype) if needs.bias else None,
    )


def _linear(dtype: torch.dtype, shapes: Shapes) -> None:
    for outputs in _OUTPUTS:
        linear(_zeros(1, shapes.hidden), _zeros(outputs, shapes.hidden, dtype=dtype))


def _norm(dtype: torch.dtype, shapes: Shapes) -> None:
    widths = {shapes.hidden}
    if isinstance(shapes.kv_shape, HeadsShape):
        widths.add(shapes.kv_shape.head_dim)  # queries and keys, in families that norm them
    for width in sorted(widths):
        rms_norm(_zeros(1, width), _zeros(width, dtype=dtype), 1e-6)


def _rope(shapes: Shapes) -> None:
    kv, pairs = shapes.kv_shape, shapes.rotated_pairs
    both = {(shapes.num_heads, 2 * pairs), (1, 2 * pairs)}
    if isinstance(kv, HeadsShape):
        both = {(shapes.num_heads, kv.head_dim), (kv.kv_heads, kv.head_dim)}
    for heads, width in sorted(both):
        rope(_zeros(1, heads, width), _zeros(1, pairs), _zeros(1, pairs))


def _gate(needs: Needs, intermediate: int) -> None:
    gated(_zeros(1, 2 * intermediate), needs.act)


def _sort() -> None:
    sort_by_slot(_zeros(1, 1, dtype=torch.int64), 1)


def _sample() -> None:
    sample(_zeros(1, 2), [Cut(temperature=1.0)], [0], [0])
