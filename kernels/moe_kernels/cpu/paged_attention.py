"""Attention over pages by compiled kernels; `moe_kernels.paged_attention` is the contract.

What a layer and a step need in arrays is made once: the pages' memory as flat bytes, and the step's
work for each kind of layer. Widths that are no multiple of eight, and blocks of less than four
tokens, stay with the reference.
Neighbours: `attention` are the kernels, `attention_work` cuts the step, `kv_codes` views the pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.cpu.attention import ATTENDING, attend_all
from moe_kernels.cpu.attention_chunks import partials_for
from moe_kernels.cpu.attention_work import attention_work
from moe_kernels.cpu.kv_codes import VECTOR_WIDTH, StoredSide, no_side, readable, stored_sides
from moe_kernels.cpu.team import num_threads
from moe_kernels.kv_formats import LatentShape
from moe_kernels.kv_pages import KvPages
from moe_kernels.reference import paged_attention as reference

_NO_SINKS = np.empty(0, dtype=np.float32)
_NO_VECTORS = np.empty((0, 0), dtype=np.float32)


class _Operands(NamedTuple):
    """A layer's pages as the kernels take them."""

    key: StoredSide
    key_tail: StoredSide
    """Elements of a key behind the first side's: the rotated part of a latent."""
    value: StoredSide
    center_ND: NDArray[np.float32]
    channel_ND: NDArray[np.float32]


def paged_attention(
    q_THD: Tensor,
    pages: KvPages,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See the contract."""
    operands = pages.derived.get("cpu", partial(_operands, pages))
    if operands is None:
        return reference.paged_attention(
            q_THD, pages, plan, scale=scale, window=window, sinks_H=sinks_H
        )
    if window is not None:
        plan = plan.windowed(window)
    num_tokens, num_heads, width = q_THD.shape
    out_THV = torch.empty((num_tokens, num_heads, int(operands.value.sizes[VECTOR_WIDTH])))
    threads = num_threads()
    work = attention_work(plan, pages.num_heads, num_heads // pages.num_heads, threads)
    if work.end_block > pages.num_blocks:  # the kernels read wherever they are told
        raise IndexError(f"block {work.end_block - 1} is none of {pages.num_blocks}")
    common: tuple[Any, ...] = (
        work.tables,
        pages.block_size,
        window or 0,
        np.float32(width**-0.5 if scale is None else scale),
        _NO_SINKS if sinks_H is None else sinks_H.contiguous().numpy(),
        operands.center_ND,
        operands.channel_ND,
        partials_for(work.num_partials, out_THV.shape[2]),
        out_THV.numpy(),
    )
    q = q_THD.contiguous().numpy()
    key, key_tail, value = operands.key, operands.key_tail, operands.value
    attend_all(q, key, key_tail, value, work.units, work.bounds, *common)
    return out_THV


def _operands(pages: KvPages) -> _Operands | None:
    """None where the kernels cannot read the pages."""
    if not readable(pages):
        return None
    ATTENDING.fill()
    sides = stored_sides(pages)
    if isinstance(pages.shape, LatentShape):
        key, key_tail, value = sides["latent"], sides["rope"], sides["latent"]
    else:
        key, key_tail, value = sides["key"], no_side(sides["key"]), sides["value"]
    center_ND, channel_ND = (
        _NO_VECTORS if values is None else values.contiguous().numpy()
        for values in (pages.key_center_ND, pages.key_channel_ND)
    )
    return _Operands(key, key_tail, value, center_ND, channel_ND)
