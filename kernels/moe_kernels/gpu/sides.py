"""Pages as the kernels take them: each side of a token with its address, code and widths.

A side's vector of a token lies at row ((block · SIDES + SIDE) · HEADS + head) · block_size + offset
of its part's data, and of its scales. Neighbours: `kv_pages` writes sides, `paged_attention` reads
them through `kv_operands`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from moe_kernels.gpu.jit import padded
from moe_kernels.kv_formats import CodeName, Side
from moe_kernels.kv_pages import KvPages

_LEAST_WIDTH = 32
"""Of a tile: half of it, where a byte holds two codes, is the least that tensor cores take."""


@dataclass(frozen=True)
class StoredSide:
    code: CodeName
    data: Tensor
    scales: Tensor
    """The data again where the code has no scales."""
    width: int
    padded: int
    """The width as a tile's: a power of two."""
    sides: int
    index: int
    """Which of its part's sides."""
    global_scale: float
    """1 where there is none."""


def stored_sides(pages: KvPages) -> dict[Side, StoredSide]:
    """Made once for a layer's pages: the global scales are copied to the host."""
    return pages.derived.get("gpu sides", partial(_sides, pages))


def _sides(pages: KvPages) -> dict[Side, StoredSide]:
    global_scales = pages.global_scales
    return {
        side: StoredSide(
            code=page.part.code,
            data=page.data,
            scales=page.data if page.scales is None else page.scales,
            width=page.part.width,
            padded=padded(page.part.width, _LEAST_WIDTH),
            sides=len(page.part.sides),
            index=index,
            global_scale=global_scales.get(side, 1.0),
        )
        for page in pages.parts
        for index, side in enumerate(page.part.sides)
    }
