"""Attention over paged keys and values, for decode and prefill alike, split along the keys.

    q [T, H, D] float32, pages → out [T, H, V] float32
A program takes a tile of ROWS rows (queries of one sequence times the query heads of one kv head,
or 16 of them) and walks its keys, KEYS at a time, decoded in registers (`kv_operands`). A split of
SPLIT_KEYS positions has a running maximum, sum and weighted values of its own; finished splits are
merged in order of position, by this program or, when they are units of their own, by `merge_parts`,
with the same operations. KEYS and SPLIT_KEYS cut by position, never by how many keys or queries
there are, and what a row does not see adds exact zeros: its bits do not depend on chunk or batch.
Scores are in base 2: their scale has log2(e) in it, and the key's unit.
A tile's queries share its keys: a NaN value that one of them sees spoils those before it in the
tile too, as with the reference. Other sequences and older tiles never meet it.
Neighbours: `moe_kernels.paged_attention` is the contract, `attention_work` cuts a step.

Letters: T tokens, H query heads, N kv heads, D key and V value width, P parts, X programs per tile.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.gpu.attention_work import ROWS, SPLIT_KEYS, UNIT_COLUMNS, attention_work
from moe_kernels.gpu.jit import SAFE, blocks, compiled, compiled_for_any
from moe_kernels.gpu.kv_operands import add_product, load_pairs, load_whole, unit
from moe_kernels.gpu.sides import StoredSide, stored_sides
from moe_kernels.kv_formats import LatentShape
from moe_kernels.kv_pages import KvPages

LOG2_E = math.log2(math.e)
WIDE = 256
"""Wider vectors are walked in shorter blocks."""
FROM_STEP = ("window", "key_factor", "tail_factor", "value_factor", "sink_factor")


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
    if window is not None:
        plan = plan.windowed(window)
    sides = stored_sides(pages)
    is_latent = isinstance(pages.shape, LatentShape)
    key, value = (sides["latent"],) * 2 if is_latent else (sides["key"], sides["value"])
    tail = sides["rope"] if is_latent else key
    num_tokens, num_heads, width = q_THD.shape
    out_THV = torch.empty(
        (num_tokens, num_heads, value.width), dtype=torch.float32, device=q_THD.device
    )
    group = num_heads // pages.num_heads
    programs = pages.num_heads * blocks(group, ROWS)
    work = attention_work(plan, programs, group, q_THD.device)
    if work.end_block > pages.num_blocks:  # the kernels read wherever they are told
        raise IndexError(f"block {work.end_block - 1} is none of {pages.num_blocks}")
    if not num_tokens:
        return out_THV
    parts_PXRV, states_PX3R = (
        torch.empty((work.num_parts, programs, *rest), dtype=torch.float32, device=q_THD.device)
        for rest in ((ROWS, value.width), (3, ROWS))
    )
    q_THD = q_THD.contiguous()
    center, channel = pages.key_center_ND, pages.key_channel_ND
    scale = (width**-0.5 if scale is None else scale) * LOG2_E
    sinks = q_THD if sinks_H is None else sinks_H.contiguous()
    common: dict[str, Any] = {
        "SINKS": sinks_H is not None, "HEADS": num_heads, "GROUP": group, "ROWS": ROWS,
        "UNIT_COLUMNS": UNIT_COLUMNS, **_of_side("VALUE", value),
    }  # fmt: skip
    attend_units[(len(work.units), programs)](
        q_THD, out_THV, parts_PXRV, states_PX3R, work.units, work.tables,
        key.data, key.scales, tail.data, tail.scales, value.data, value.scales, sinks,
        q_THD if center is None else center.contiguous(),
        q_THD if channel is None else channel.contiguous(),
        window or 0, scale * unit(key), scale * unit(tail), unit(value), scale,
        WINDOWED=window is not None, TAIL=is_latent,
        CENTER=center is not None, CHANNEL=channel is not None, WIDTH=width,
        BLOCK_SIZE=pages.block_size, SPLIT=SPLIT_KEYS, KEYS=32 if key.padded > WIDE else 64,
        **_of_side("KEY", key), **_of_side("TAIL", tail), **common,
        num_warps=4, num_stages=3, **SAFE,
    )  # fmt: skip
    if work.num_parts:
        merge_parts[(len(work.merges), programs)](
            out_THV, parts_PXRV, states_PX3R, work.merges, unit(value), **common,
            num_warps=4, **SAFE,
        )  # fmt: skip
    return out_THV


def _of_side(name: str, side: StoredSide) -> dict[str, Any]:
    return {
        f"{name}_CODE": side.code,
        f"{name}_WIDTH": side.width,
        f"{name}_PADDED": side.padded,
        f"{name}_SIDES": side.sides,
        f"{name}_SIDE": side.index,
    }


@compiled_for_any(*FROM_STEP)
def attend_units(
    q_THD: tl.tensor,
    out_THV: tl.tensor,
    parts_PXRV: tl.tensor,
    states_PX3R: tl.tensor,
    units: tl.tensor,
    tables: tl.tensor,
    key_data: tl.tensor,
    key_scales: tl.tensor,
    tail_data: tl.tensor,
    tail_scales: tl.tensor,
    value_data: tl.tensor,
    value_scales: tl.tensor,
    sinks_H: tl.tensor,
    center_ND: tl.tensor,
    channel_ND: tl.tensor,
    window: tl.tensor,
    key_factor: tl.tensor,
    tail_factor: tl.tensor,
    value_factor: tl.tensor,
    sink_factor: tl.tensor,
    WINDOWED: tl.constexpr,
    TAIL: tl.constexpr,
    CENTER: tl.constexpr,
    CHANNEL: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    KEY_CODE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    KEY_SIDES: tl.constexpr,
    KEY_SIDE: tl.constexpr,
    TAIL_CODE: tl.constexpr,
    TAIL_WIDTH: tl.constexpr,
    TAIL_PADDED: tl.constexpr,
    TAIL_SIDES: tl.constexpr,
    TAIL_SIDE: tl.constexpr,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUE_SIDES: tl.constexpr,
    VALUE_SIDE: tl.constexpr,
) -> None:
    unit = units + tl.program_id(0) * UNIT_COLUMNS
    position, queries = tl.load(unit + 1), tl.load(unit + 2)
    table, first_split, end_split = tl.load(unit + 3), tl.load(unit + 4), tl.load(unit + 5)
    KV_HEADS: tl.constexpr = HEADS // GROUP
    kv_head, vector, has_row, query = rows_of_tile(tl.load(unit), queries, HEADS, GROUP, ROWS)
    last = position + queries - 1
    at = tl.where(has_row, position + query, -1)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(position - window + 1, 0)

    q_at = q_THD + vector * WIDTH
    channel = channel_ND + kv_head * WIDTH
    key_even, key_odd = load_queries(
        q_at, has_row, channel, key_factor, CHANNEL, KEY_CODE, KEY_WIDTH, KEY_PADDED
    )
    tail_even, tail_odd = key_even, key_odd
    if TAIL:
        tail_even, tail_odd = load_queries(
            q_at + KEY_WIDTH, has_row, channel, tail_factor, False,
            TAIL_CODE, TAIL_WIDTH, TAIL_PADDED,
        )  # fmt: skip
    VALUE_PAIRS: tl.constexpr = VALUE_CODE == "nvfp4" or VALUE_CODE == "mxfp4"
    EVEN: tl.constexpr = VALUE_PADDED // 2 if VALUE_PAIRS else VALUE_PADDED
    ODD: tl.constexpr = EVEN if VALUE_PAIRS else 1

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    even, odd = tl.zeros((ROWS, EVEN), tl.float32), tl.zeros((ROWS, ODD), tl.float32)
    for split in range(first_split, end_split):
        part_top = tl.full((ROWS,), float("-inf"), tl.float32)
        part_total = tl.zeros((ROWS,), tl.float32)
        part_even = tl.zeros((ROWS, EVEN), tl.float32)
        part_odd = tl.zeros((ROWS, ODD), tl.float32)
        begin = tl.maximum(split * SPLIT, lowest // KEYS * KEYS)
        for start in range(begin, tl.minimum((split + 1) * SPLIT, last + 1), KEYS):
            key = start + tl.arange(0, KEYS)
            has = (key >= lowest) & (key <= last)
            block = tl.load(tables + table + key // BLOCK_SIZE, mask=has, other=0).to(tl.int64)
            offset = key % BLOCK_SIZE

            scores = tl.zeros((ROWS, KEYS), tl.float32)
            stored = ((block * KEY_SIDES + KEY_SIDE) * KV_HEADS + kv_head) * BLOCK_SIZE + offset
            scores = add_scores(
                scores, key_even, key_odd, key_data, key_scales, stored, has,
                KEY_CODE, KEY_WIDTH, KEY_PADDED,
            )  # fmt: skip
            if TAIL:
                stored = (block * TAIL_SIDES + TAIL_SIDE) * BLOCK_SIZE + offset
                scores = add_scores(
                    scores, tail_even, tail_odd, tail_data, tail_scales, stored, has,
                    TAIL_CODE, TAIL_WIDTH, TAIL_PADDED,
                )  # fmt: skip
            is_seen = (key[None, :] <= at[:, None]) & has[None, :]
            if WINDOWED:
                is_seen = is_seen & (key[None, :] > at[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))

            highest = tl.maximum(part_top, tl.max(scores, 1))
            base = finite_base(highest)
            weights = tl.exp2(scores - base[:, None])
            kept = tl.exp2(part_top - base)
            part_total = part_total * kept + tl.sum(weights, 1)
            part_even = part_even * kept[:, None]
            part_odd = part_odd * kept[:, None]
            part_top = highest
            stored = ((block * VALUE_SIDES + VALUE_SIDE) * KV_HEADS + kv_head) * BLOCK_SIZE + offset
            if VALUE_PAIRS:
                v_even, v_odd = load_pairs(
                    value_data, value_scales, stored, has, VALUE_CODE, VALUE_WIDTH, VALUE_PADDED
                )
                part_even = add_product(weights, v_even, part_even)
                part_odd = add_product(weights, v_odd, part_odd)
            else:
                v = load_whole(value_data, stored, has, VALUE_CODE, VALUE_WIDTH, VALUE_PADDED)
                part_even = add_product(weights, v, part_even)
        top, total, even, odd = merge(
            top, total, even, odd, part_top, part_total, part_even, part_odd
        )

    sink = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        sink = sinks_of_rows(
            sinks_H, vector % HEADS, has_row, q_at, center_ND + kv_head * WIDTH, sink_factor,
            CENTER, WIDTH, KEY_PADDED,
        )  # fmt: skip
    part = tl.load(unit + 6)
    if part < 0:
        finish(
            out_THV, vector, has_row, top, total, even, odd, sink, value_factor,
            SINKS, VALUE_PAIRS, VALUE_WIDTH, EVEN, ODD,
        )  # fmt: skip
    else:
        program = part.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        row = tl.arange(0, ROWS)
        state = states_PX3R + program * (3 * ROWS) + row
        tl.store(state, top)
        tl.store(state + ROWS, total)
        tl.store(state + 2 * ROWS, sink)
        store_values(
            parts_PXRV, program * ROWS + row[:, None], row[:, None] >= 0, even, odd,
            VALUE_PAIRS, VALUE_WIDTH, EVEN, ODD,
        )  # fmt: skip


@compiled_for_any("value_factor")
def merge_parts(
    out_THV: tl.tensor,
    parts_PXRV: tl.tensor,
    states_PX3R: tl.tensor,
    merges: tl.tensor,
    value_factor: tl.tensor,
    SINKS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT_COLUMNS: tl.constexpr,
    VALUE_CODE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    VALUE_SIDES: tl.constexpr,
    VALUE_SIDE: tl.constexpr,
) -> None:
    """The parts of a tile, in order of position; whole vectors, whatever code they came from."""
    tile = merges + tl.program_id(0) * UNIT_COLUMNS
    _, vector, has_row, _ = rows_of_tile(tl.load(tile), tl.load(tile + 2), HEADS, GROUP, ROWS)
    num_parts, first = tl.load(tile + 5), tl.load(tile + 6).to(tl.int64)
    row, column = tl.arange(0, ROWS), tl.arange(0, VALUE_PADDED)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total, sink = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    values, none = tl.zeros((ROWS, VALUE_PADDED), tl.float32), tl.zeros((ROWS, 1), tl.float32)
    for part in range(num_parts):
        program = (first + part) * tl.num_programs(1) + tl.program_id(1)
        state = states_PX3R + program * (3 * ROWS) + row
        part_values = tl.load(
            parts_PXRV + (program * ROWS + row[:, None]) * VALUE_WIDTH + column,
            mask=(column < VALUE_WIDTH) & (row[:, None] >= 0),
            other=0.0,
        )
        sink = tl.load(state + 2 * ROWS)
        top, total, values, none = merge(
            top, total, values, none, tl.load(state), tl.load(state + ROWS), part_values, none
        )
    finish(
        out_THV, vector, has_row, top, total, values, none, sink, value_factor,
        SINKS, False, VALUE_WIDTH, VALUE_PADDED, 1,
    )  # fmt: skip


@compiled
def rows_of_tile(
    first_row: tl.tensor,
    queries: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Its kv head; of its rows: vector of q and out [ROWS, 1], whether there is one, its query."""
    CHUNKS: tl.constexpr = (GROUP + ROWS - 1) // ROWS
    HEADS_OF_TILE: tl.constexpr = GROUP if GROUP < ROWS else ROWS
    program = tl.program_id(1)
    kv_head, first = program // CHUNKS, program % CHUNKS * ROWS
    row = tl.arange(0, ROWS)
    query, head = row // HEADS_OF_TILE, first + row % HEADS_OF_TILE
    has_row = (query < queries) & (head < GROUP)
    vector = (first_row + query).to(tl.int64) * HEADS + kv_head * GROUP + head
    return kv_head, vector[:, None], has_row, query


@compiled
def load_queries(
    q_at: tl.tensor,
    has_row: tl.tensor,
    channel_D: tl.tensor,
    factor: tl.tensor,
    CHANNEL: tl.constexpr,
    CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Even and odd elements where the code has pairs, else all elements twice."""
    if CODE == "nvfp4" or CODE == "mxfp4":
        at = 2 * tl.arange(0, PADDED // 2)[None, :]
        even = load_query(q_at, at, has_row, channel_D, factor, CHANNEL, WIDTH)
        odd = load_query(q_at, at + 1, has_row, channel_D, factor, CHANNEL, WIDTH)
    else:
        at = tl.arange(0, PADDED)[None, :]
        even = load_query(q_at, at, has_row, channel_D, factor, CHANNEL, WIDTH)
        odd = even
    return even, odd


@compiled
def load_query(
    q_at: tl.tensor,
    at: tl.tensor,
    has_row: tl.tensor,
    channel_D: tl.tensor,
    factor: tl.tensor,
    CHANNEL: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    q = tl.load(q_at + at, mask=has_row[:, None] & (at < WIDTH), other=0.0) * factor
    if CHANNEL:
        q = q * tl.load(channel_D + at, mask=at < WIDTH, other=0.0)
    return q


@compiled
def add_scores(
    scores: tl.tensor,
    q_even: tl.tensor,
    q_odd: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    stored: tl.tensor,
    has: tl.tensor,
    CODE: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    if CODE == "nvfp4" or CODE == "mxfp4":
        k_even, k_odd = load_pairs(data, scales, stored, has, CODE, WIDTH, PADDED)
        scores = add_product(q_even, tl.trans(k_even), scores)
        scores = add_product(q_odd, tl.trans(k_odd), scores)
    else:
        k = load_whole(data, stored, has, CODE, WIDTH, PADDED)
        scores = add_product(q_even, tl.trans(k), scores)
    return scores


@compiled
def finite_base(top: tl.tensor) -> tl.tensor:
    """What to take off exponents: zero before a row has seen any key."""
    return tl.where(top == float("-inf"), 0.0, top)


@compiled
def merge(
    top: tl.tensor,
    total: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    part_top: tl.tensor,
    part_total: tl.tensor,
    part_even: tl.tensor,
    part_odd: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Two sums of exponentials as one. A part that saw nothing changes no bit."""
    highest = tl.maximum(top, part_top)
    base = finite_base(highest)
    kept, added = tl.exp2(top - base), tl.exp2(part_top - base)
    total = total * kept + part_total * added
    even = even * kept[:, None] + part_even * added[:, None]
    odd = odd * kept[:, None] + part_odd * added[:, None]
    return highest, total, even, odd


@compiled
def sinks_of_rows(
    sinks_H: tl.tensor,
    head: tl.tensor,
    has_row: tl.tensor,
    q_at: tl.tensor,
    center_D: tl.tensor,
    factor: tl.tensor,
    CENTER: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:
    """A sink's logit beside scores of keys as they are stored: less what a center took from all."""
    logit = tl.load(sinks_H + head, mask=has_row[:, None], other=0.0)
    sink = tl.sum(logit, 1) * LOG2_E_OF_SINK
    if CENTER:
        at = tl.arange(0, PADDED)[None, :]
        q = tl.load(q_at + at, mask=has_row[:, None] & (at < WIDTH), other=0.0) * factor
        sink = sink - tl.sum(q * tl.load(center_D + at, mask=at < WIDTH, other=0.0), 1)
    return sink


LOG2_E_OF_SINK = tl.constexpr(LOG2_E)


@compiled
def finish(
    out_THV: tl.tensor,
    vector: tl.tensor,
    has_row: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    sink: tl.tensor,
    value_factor: tl.tensor,
    SINKS: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    ODD: tl.constexpr,
) -> None:
    """The sink takes its part, the sum is divided out, and rows that there are are stored."""
    if SINKS:
        highest = tl.maximum(top, sink)
        kept = tl.exp2(top - highest)
        total = total * kept + tl.exp2(sink - highest)
        even, odd = even * kept[:, None], odd * kept[:, None]
    even = tl.div_rn(even * value_factor, total[:, None])
    odd = tl.div_rn(odd * value_factor, total[:, None])
    store_values(out_THV, vector, has_row[:, None], even, odd, PAIRS, WIDTH, EVEN, ODD)


@compiled
def store_values(
    to: tl.tensor,
    vector: tl.tensor,
    has: tl.tensor,
    even: tl.tensor,
    odd: tl.tensor,
    PAIRS: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    ODD: tl.constexpr,
) -> None:
    if PAIRS:
        at = 2 * tl.arange(0, EVEN)[None, :]
        tl.store(to + vector * WIDTH + at, even, mask=has & (at < WIDTH))
        tl.store(to + vector * WIDTH + at + 1, odd, mask=has & (at < WIDTH))
    else:
        at = tl.arange(0, EVEN)[None, :]
        tl.store(to + vector * WIDTH + at, even, mask=has & (at < WIDTH))
