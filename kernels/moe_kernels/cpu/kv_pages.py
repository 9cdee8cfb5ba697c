"""Appending to pages by compiled kernels; `moe_kernels.kv_pages` is the contract.

The bytes are the reference's. Where the probe wants to look at what is stored, and for widths that
the kernels do not take, the reference writes them.
Neighbours: `kv_encode` are the kernels, `kv_codes` views the pages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moe_kernels import kv_pages as contract
from moe_kernels.cpu.kv_codes import StoredSide, readable, stored_sides
from moe_kernels.cpu.kv_encode import ENCODING, encode_all
from moe_kernels.cpu.team import num_threads
from moe_kernels.kv_formats import Side
from moe_kernels.kv_pages import KvPages

ELEMENTS_PER_THREAD = 1 << 14
"""Fewer are quantised sooner than a second thread is woken."""
_NO_VECTORS = np.empty((0, 0), dtype=np.float32)


def append(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """See the contract."""
    if pages.probe.wanted or not readable(pages):
        contract.append_reference(pages, k_TND, v_TND, slots_T)
        return
    center_ND, channel_ND = (
        _NO_VECTORS if values is None else values.contiguous().numpy()
        for values in (pages.key_center_ND, pages.key_channel_ND)
    )
    _write(pages, "key", k_TND, slots_T, center_ND, channel_ND)
    _write(pages, "value", v_TND, slots_T, _NO_VECTORS, _NO_VECTORS)


def append_latent(pages: KvPages, latent_TD: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """See the contract."""
    if pages.probe.wanted or not readable(pages):
        contract.append_latent_reference(pages, latent_TD, rope_TR, slots_T)
        return
    _write(pages, "latent", latent_TD.unsqueeze(1), slots_T, _NO_VECTORS, _NO_VECTORS)
    _write(pages, "rope", rope_TR.unsqueeze(1), slots_T, _NO_VECTORS, _NO_VECTORS)


def _write(
    pages: KvPages,
    name: Side,
    x_TND: Tensor,
    slots_T: Tensor,
    center_ND: NDArray[np.float32],
    channel_ND: NDArray[np.float32],
) -> None:
    side, global_scale = pages.derived.get("cpu sides", partial(_sides, pages))[name]
    slots = slots_T.contiguous().numpy()
    _check(slots, pages.num_blocks * pages.block_size)
    x = x_TND.contiguous().numpy()
    how: tuple[Any, ...] = (
        pages.block_size,
        side,
        global_scale,
        pages.format.encoding == "FourOverSix",
        center_ND,
        channel_ND,
    )
    threads = max(1, min(num_threads(), x_TND.numel() // ELEMENTS_PER_THREAD))
    encode_all(x, slots, threads, *how)


def _sides(pages: KvPages) -> dict[Side, tuple[StoredSide, np.float32]]:
    """Each with its global scale, 1 where there is none."""
    ENCODING.fill()
    return {
        name: (side, np.float32(pages.global_scales.get(name, 1.0)))
        for name, side in stored_sides(pages).items()
    }


def _check(slots: NDArray[np.int64], end: int) -> None:
    """The kernels write wherever they are told."""
    if len(slots) and not 0 <= slots.min() <= slots.max() < end:
        raise IndexError(f"slots {slots.min()} to {slots.max()} are not all within 0 to {end - 1}")
