"""The attention half of a layer by one compiled call; `moe_kernels.grouped_query` is the contract.

What the call takes of a layer, of its pages and of a step is viewed and checked once and kept with
each. Pages that the kernels cannot read, and a probe that wants to see what is stored, take the
composition.
Neighbour: `grouped_query_kernel` is what is called.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from moe_kernels import grouped_query as contract
from moe_kernels.attention_step import AttentionStep
from moe_kernels.cpu.arrays import float32_array, stored_array
from moe_kernels.cpu.attention import ATTENDING
from moe_kernels.cpu.attention_chunks import Partials
from moe_kernels.cpu.frozen import Frozen
from moe_kernels.cpu.grouped_query_kernel import (
    CacheArrays,
    HalfArrays,
    LayerArrays,
    StepArrays,
    attention_half,
    fill_slots,
)
from moe_kernels.cpu.jit import Array
from moe_kernels.cpu.kv_codes import StoredSide, no_side, readable, stored_sides
from moe_kernels.cpu.kv_encode import ENCODING
from moe_kernels.cpu.step_arrays import StepLines, kind_of, make_step
from moe_kernels.cpu.team import num_threads
from moe_kernels.grouped_query import GroupedQueryLayer
from moe_kernels.kv_pages import KvPages

_NONE = np.empty(0, dtype=np.float32)
_NO_VECTORS = np.empty((0, 0), dtype=np.float32)


def grouped_query(
    x_TH: Tensor, layer: GroupedQueryLayer, pages: KvPages, step: AttentionStep
) -> Tensor:
    """See the contract."""
    half = None if pages.probe.wanted or not len(x_TH) else half_arrays(layer, pages)
    if half is None:
        return contract.composed(x_TH, layer, pages, step)
    out_TH = torch.empty(x_TH.shape, dtype=torch.float32)
    of_step = step_arrays(layer, pages, step)
    attention_half(float32_array(x_TH), half, *of_step, out_TH.numpy())
    return out_TH


def half_arrays(layer: GroupedQueryLayer, pages: KvPages) -> HalfArrays | None:
    """None where the kernel has no code for the matrices or the pages."""
    cache = pages.derived.get("cpu grouped query", partial(_cache_arrays, pages))
    if cache is None or layer.qkv_QH.dtype != layer.o_HQ.dtype:
        return None
    return HalfArrays(layer.derived.get("cpu", partial(_layer_arrays, layer)), *cache)


def frozen_step(layer: GroupedQueryLayer, pages: KvPages, step: AttentionStep) -> Frozen:
    """`step_arrays` for kernels that take addresses."""
    key = "cpu frozen", layer.window, layer.num_heads, layer.num_kv_heads, pages.num_blocks
    frozen: Frozen = step.derived.get(
        (*key, num_threads()), lambda: Frozen(step_arrays(layer, pages, step))
    )
    return frozen


def step_arrays(
    layer: GroupedQueryLayer, pages: KvPages, step: AttentionStep
) -> tuple[StepArrays, Partials]:
    """The same, of one step, for all layers of a model that have the same window."""
    threads = num_threads()
    return step.derived.get(
        ("cpu", layer.window, layer.num_heads, layer.num_kv_heads, pages.num_blocks, threads),
        partial(_step_arrays, layer, pages, step, threads),
    )


def _layer_arrays(layer: GroupedQueryLayer) -> LayerArrays:
    scale = layer.head_dim**-0.5 if layer.scale is None else layer.scale
    clip = np.inf if layer.clip is None else layer.clip
    sizes = [layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window or 0]
    qkv_QH = stored_array(layer.qkv_QH)
    fill_slots(qkv_QH.dtype)
    return LayerArrays(
        _wide(layer.norm_H),
        qkv_QH,
        stored_array(layer.o_HQ),
        _wide(layer.qkv_bias_Q),
        _wide(layer.o_bias_H),
        _wide(layer.q_norm),
        _wide(layer.k_norm),
        _wide(layer.sinks_N),
        np.array(sizes, dtype=np.int64),
        np.array([layer.eps, clip, scale, layer.residual], dtype=np.float32),
    )


def _wide(x: Tensor | None) -> Array:
    return _NONE if x is None else float32_array(x.to(torch.float32))


def _cache_arrays(
    pages: KvPages,
) -> tuple[StoredSide, StoredSide, StoredSide, CacheArrays] | None:
    """Keys, nothing behind keys, values, and the rest; None where the kernels cannot read them."""
    if not readable(pages):
        return None
    ENCODING.fill()
    ATTENDING.fill()
    sides = stored_sides(pages)
    center_KD, channel_KD = (
        _NO_VECTORS if values is None else float32_array(values)
        for values in (pages.key_center_ND, pages.key_channel_ND)
    )
    scales = pages.global_scales
    rest = CacheArrays(
        center_KD,
        channel_KD,
        np.array([pages.block_size, pages.format.encoding == "FourOverSix"], dtype=np.int64),
        np.array([scales.get("key", 1.0), scales.get("value", 1.0)], dtype=np.float32),
    )
    return sides["key"], no_side(sides["key"]), sides["value"], rest


def _step_arrays(
    layer: GroupedQueryLayer,
    pages: KvPages,
    step: AttentionStep,
    threads: int,
) -> tuple[StepArrays, Partials]:
    table, slots = step.plan.table, step.slots_T.contiguous().numpy()
    # The kernels read and write wherever they are told.
    end = pages.num_blocks * pages.block_size
    if not 0 <= slots.min() <= slots.max() < end:
        raise IndexError(f"slots {slots.min()} to {slots.max()} are not all within 0 to {end - 1}")
    last_block = table.blocks.max(initial=-1)
    if last_block >= pages.num_blocks:
        raise IndexError(f"block {last_block} is none of {pages.num_blocks}")
    lines = StepLines(
        table.start_S, table.num_tokens_S, table.first_row_S, table.first_block_S, table.blocks
    )
    angles = float32_array(step.cos_TF), float32_array(step.sin_TF)
    made: tuple[StepArrays, Partials] = make_step(*angles, slots, lines, kind_of(layer), threads)
    return made
