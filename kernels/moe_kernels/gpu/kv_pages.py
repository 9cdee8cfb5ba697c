"""Appending to pages: a program encodes TOKENS vectors of one head of one side, in registers.

    x [T, N, D] float32 → data (and scales) of the block and offset that slots_T names
Keys are first moved by their center and divided by their channels' scale. The FP4 codes read even
and odd elements apart, so that two codes of a byte meet in one register without a shuffle; a scale
belongs to 16 elements, 8 bytes (MXFP4: 32 and 16). Every step is exact or rounded once (see
`numbers`), so the bytes are the reference's, wherever a token is stored and with whom.
The slots are looked at on the host once a step, not once a layer; besides, nothing is ever written
outside of the pages. Where the probe wants to look at what is stored, the reference writes it.
Neighbours: `moe_kernels.kv_pages` is the contract, `numbers` the codes, `sides` the pages' places.

Letters: T tokens, N heads, D width of a vector.
"""

from __future__ import annotations

from collections.abc import MutableMapping

import torch
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from moe_kernels import kv_pages as contract
from moe_kernels.gpu.jit import SAFE, blocks, compiled, compiled_for_any
from moe_kernels.gpu.numbers import (
    INFINITY_BITS,
    bits,
    decode_e2m1_small,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    rounded,
)
from moe_kernels.gpu.sides import StoredSide, stored_sides
from moe_kernels.kv_formats import Side
from moe_kernels.kv_pages import KvPages

TOKENS = 16
_checked: MutableMapping[Tensor, int] = WeakIdKeyDictionary()
"""Slots that were found to be within so many."""


def append(pages: KvPages, k_TND: Tensor, v_TND: Tensor, slots_T: Tensor) -> None:
    """See the contract."""
    if pages.probe.wanted:
        contract.append_reference(pages, k_TND, v_TND, slots_T)
        return
    _write(pages, "key", k_TND, slots_T, pages.key_center_ND, pages.key_channel_ND)
    _write(pages, "value", v_TND, slots_T)


def append_latent(pages: KvPages, latent_TD: Tensor, rope_TR: Tensor, slots_T: Tensor) -> None:
    """See the contract."""
    if pages.probe.wanted:
        contract.append_latent_reference(pages, latent_TD, rope_TR, slots_T)
        return
    _write(pages, "latent", latent_TD.unsqueeze(1), slots_T)
    _write(pages, "rope", rope_TR.unsqueeze(1), slots_T)


def _write(
    pages: KvPages,
    name: Side,
    x_TND: Tensor,
    slots_T: Tensor,
    center_ND: Tensor | None = None,
    channel_ND: Tensor | None = None,
) -> None:
    num_tokens, num_heads, _ = x_TND.shape
    num_places = pages.num_blocks * pages.block_size
    _check(slots_T, num_places)
    if not num_tokens:
        return
    side: StoredSide = stored_sides(pages)[name]
    encode_vectors[(blocks(num_tokens, TOKENS), num_heads)](
        x_TND.contiguous(), slots_T.contiguous(), side.data, side.scales,
        x_TND if center_ND is None else center_ND.contiguous(),
        x_TND if channel_ND is None else channel_ND.contiguous(),
        num_tokens, num_places, side.global_scale,
        CENTER=center_ND is not None, CHANNEL=channel_ND is not None,
        BEST_OF_TWO=pages.format.encoding == "FourOverSix",
        CODE=side.code, WIDTH=side.width, PADDED=side.padded, SIDES=side.sides, SIDE=side.index,
        HEADS=num_heads, BLOCK_SIZE=pages.block_size, TOKENS=TOKENS, num_warps=4, **SAFE,
    )  # fmt: skip


def _check(slots_T: Tensor, end: int) -> None:
    """Once for the slots of a step, as it waits for the device."""
    if slots_T.numel() and _checked.get(slots_T) != end:
        low, high = (int(bound) for bound in torch.aminmax(slots_T))
        if not 0 <= low <= high < end:
            raise IndexError(f"slots {low} to {high} are not all within 0 to {end - 1}")
        _checked[slots_T] = end


@compiled_for_any("num_tokens", "num_places", "global_scale")
def encode_vectors(
    x_TND: tl.tensor,
    slots_T: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    center_ND: tl.tensor,
    channel_ND: tl.tensor,
    num_tokens: tl.tensor,
    num_places: tl.tensor,
    global_scale: tl.tensor,
    CENTER: tl.constexpr,
    CHANNEL: tl.constexpr,
    BEST_OF_TWO: tl.constexpr,
    CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    SIDES: tl.constexpr,
    SIDE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots_T + token, mask=token < num_tokens, other=-1)
    is_real = ((slot >= 0) & (slot < num_places))[:, None]
    vector = ((slot // BLOCK_SIZE * SIDES + SIDE) * HEADS + head) * BLOCK_SIZE + slot % BLOCK_SIZE
    center_D, channel_D = center_ND + head * WIDTH, channel_ND + head * WIDTH
    x_at = x_TND + (token.to(tl.int64)[:, None] * HEADS + head) * WIDTH
    if CODE == "nvfp4" or CODE == "mxfp4":
        at = tl.arange(0, PADDED // 2)[None, :]
        inside = 2 * at < WIDTH
        has = is_real & inside
        even = load_vectors(x_at, 2 * at, is_real, inside, center_D, channel_D, CENTER, CHANNEL)
        odd = load_vectors(x_at, 2 * at + 1, is_real, inside, center_D, channel_D, CENTER, CHANNEL)
        BYTES: tl.constexpr = 8 if CODE == "nvfp4" else 16
        even = tl.reshape(even, (TOKENS, PADDED // 2 // BYTES, BYTES))
        odd = tl.reshape(odd, (TOKENS, PADDED // 2 // BYTES, BYTES))
        if CODE == "nvfp4":
            scale, code_even, code_odd = encode_nvfp4(even, odd, global_scale, BEST_OF_TWO)
        else:
            scale, code_even, code_odd = encode_mxfp4(even, odd)
        packed = tl.reshape(code_even | (code_odd << 4), (TOKENS, PADDED // 2))
        tl.store(data + vector[:, None] * (WIDTH // 2) + at, packed.to(tl.uint8), mask=has)
        group = tl.arange(0, PADDED // 2 // BYTES)[None, :]
        has_group = is_real & (group * (2 * BYTES) < WIDTH)
        NUM_SCALES: tl.constexpr = WIDTH // (2 * BYTES)
        tl.store(scales + vector[:, None] * NUM_SCALES + group, scale.to(tl.uint8), mask=has_group)
    else:
        at = tl.arange(0, PADDED)[None, :]
        inside = at < WIDTH
        has = is_real & inside
        x = load_vectors(x_at, at, is_real, inside, center_D, channel_D, CENTER, CHANNEL)
        if CODE == "fp8":
            stored = encode_e4m3(tl.div_rn(x, global_scale)).to(tl.uint8)
        else:
            stored = rounded(x, data.dtype.element_ty)
        tl.store(data + vector[:, None] * WIDTH + at, stored, mask=has)


@compiled
def load_vectors(
    x_at: tl.tensor,
    at: tl.tensor,
    is_real: tl.tensor,
    inside: tl.tensor,
    center_D: tl.tensor,
    channel_D: tl.tensor,
    CENTER: tl.constexpr,
    CHANNEL: tl.constexpr,
) -> tl.tensor:
    """Elements `at` of the vectors at `x_at`, moved to where keys are stored."""
    x = tl.load(x_at + at, mask=is_real & inside, other=0.0)
    if CENTER:
        x = x - tl.load(center_D + at, mask=inside, other=0.0)
    if CHANNEL:
        x = tl.div_rn(x, tl.load(channel_D + at, mask=inside, other=1.0))
    return x


@compiled
def largest(even: tl.tensor, odd: tl.tensor) -> tl.tensor:
    """Bits of the largest magnitude of each group: NaN is above infinity, as whole numbers are
    compared."""
    sizes = tl.maximum(bits(tl.abs(even)).to(tl.int32), bits(tl.abs(odd)).to(tl.int32))
    return tl.max(sizes, 2)


@compiled
def encode_nvfp4(
    even: tl.tensor, odd: tl.tensor, global_scale: tl.tensor, BEST_OF_TWO: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales [T, groups], and codes shaped like `even` and `odd` [T, groups, 8]."""
    amax = largest(even, odd).to(tl.float32, bitcast=True)
    scale = encode_e4m3(tl.div_rn(amax, 6.0 * global_scale))
    step = (decode_e4m3(scale) * global_scale)[:, :, None]
    code_even, code_odd = encode_ratio(even, step), encode_ratio(odd, step)
    if BEST_OF_TWO:
        wide_scale = encode_e4m3(tl.div_rn(amax, 4.0 * global_scale))
        wide_step = (decode_e4m3(wide_scale) * global_scale)[:, :, None]
        wide_even, wide_odd = encode_ratio(even, wide_step), encode_ratio(odd, wide_step)
        error = squared_error(even, odd, code_even, code_odd, step)
        is_better = squared_error(even, odd, wide_even, wide_odd, wide_step) < error
        scale = tl.where(is_better, wide_scale, scale)
        code_even = tl.where(is_better[:, :, None], wide_even, code_even)
        code_odd = tl.where(is_better[:, :, None], wide_odd, code_odd)
    return scale, code_even, code_odd


@compiled
def encode_ratio(x: tl.tensor, step: tl.tensor) -> tl.tensor:
    """Codes of x / step; a step of zero makes zeros with x's signs."""
    code = encode_e2m1(tl.div_rn(x, tl.where(step == 0.0, 1.0, step)))
    return tl.where(step == 0.0, code & 8, code)


@compiled
def squared_error(
    even: tl.tensor, odd: tl.tensor, code_even: tl.tensor, code_odd: tl.tensor, step: tl.tensor
) -> tl.tensor:
    """Of each group, added up as the reference does: element i and i + 8, then i and i + 4, …"""
    LIFT: tl.constexpr = 2.0**126
    error_even = decode_e2m1_small(code_even) * LIFT * step - even
    error_odd = decode_e2m1_small(code_odd) * LIFT * step - odd
    return halved(error_even * error_even) + halved(error_odd * error_odd)


@compiled
def halved(error: tl.tensor) -> tl.tensor:
    """Sum of the last eight: i and i + 4 first, then i and i + 2, then the last two."""
    T: tl.constexpr = error.shape[0]
    GROUPS: tl.constexpr = error.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(error, (T, GROUPS, 2, 4)), (0, 1, 3, 2)))
    low, high = tl.split(tl.permute(tl.reshape(low + high, (T, GROUPS, 2, 2)), (0, 1, 3, 2)))
    low, high = tl.split(low + high)
    return low + high


@compiled
def encode_mxfp4(even: tl.tensor, odd: tl.tensor) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Scales [T, groups], and codes shaped like `even` and `odd` [T, groups, 16]."""
    size = largest(even, odd)
    exponent = tl.minimum(size >> 23, 254) - 2
    scale = tl.where(size > INFINITY_BITS, 255, tl.maximum(exponent, 0))
    step = decode_e8m0(scale)[:, :, None]
    return scale, encode_e2m1(tl.div_rn(even, step)), encode_e2m1(tl.div_rn(odd, step))
