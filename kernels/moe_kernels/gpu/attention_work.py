"""One step's attention cut into units of work for a GPU. No kernels.

A tile is some queries of one sequence, so many that with the query heads of a kv head they make
ROWS rows: decode and prefill alike. Its keys are walked in *splits* of SPLIT_KEYS positions, whose
bounds are the same for every step: each split is summed by itself, then merged in order. A unit is
a tile with all of its splits, or, in a step with few tiles, one split of a tile: many processors
then read one long sequence, and a second kernel merges what they found. The sums and their order
are the same, so which of the two a step does changes no bit.
Neighbours: `attention_plan` has the step's rows, `paged_attention` runs the units.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan

ROWS = 16
"""Of a tile: what the tensor cores' instruction takes at least."""
SPLIT_KEYS = 512
ENOUGH_PROGRAMS = 512
"""About four for each processor of a large GPU: no need to cut tiles."""
MAX_PARTS = 1 << 14
"""Parts that wait to be merged, times kv heads: bounds their memory."""

ROW, POSITION, QUERIES, TABLE, FIRST, END, PART, UNIT_COLUMNS = range(8)
"""Columns of a unit: its first row of q, that row's position, its queries, where its sequence's
block table starts, its splits, and where its part is kept, −1 = it is the whole tile."""
PARTS_OF_TILE = END
"""Column of a tile that is merged from its parts, the first of which column PART names."""

Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionWork:
    units: Tensor
    """int32, those with most splits first."""
    merges: Tensor
    """int32, a line like a unit's per tile that is merged; FIRST has no meaning."""
    tables: Tensor
    """int32, block tables of all sequences, one after the other."""
    num_parts: int
    end_block: int
    """One more than the largest block."""


def attention_work(
    plan: AttentionPlan, programs_per_tile: int, group: int, device: torch.device
) -> AttentionWork:
    """Made once of a plan for all layers that are alike; `programs_per_tile` differ in heads."""
    return plan.derived.get(
        ("gpu", programs_per_tile, group, str(device)),
        partial(_cut, plan, programs_per_tile, group, device),
    )


def queries_per_tile(group: int) -> int:
    return max(1, ROWS // group)


def _cut(
    plan: AttentionPlan, programs_per_tile: int, group: int, device: torch.device
) -> AttentionWork:
    tiles, tables = _tiles(plan, queries_per_tile(group))
    tiles = tiles[np.argsort(tiles[:, FIRST] - tiles[:, END], kind="stable")]
    num_splits = tiles[:, END] - tiles[:, FIRST]
    num_cut = _tiles_to_cut(num_splits, programs_per_tile)
    cut, whole = tiles[:num_cut], tiles[num_cut:]
    counts = num_splits[:num_cut]
    begins = np.cumsum(counts) - counts
    num_parts = int(counts.sum())
    parts = np.repeat(cut, counts, axis=0)
    parts[:, PART] = np.arange(num_parts)
    parts[:, FIRST] += (parts[:, PART] - np.repeat(begins, counts)).astype(np.int32)
    parts[:, END] = parts[:, FIRST] + 1
    merges = cut.copy()
    merges[:, PART], merges[:, PARTS_OF_TILE] = begins, counts

    def tensor(values: Int32s) -> Tensor:
        return torch.from_numpy(values).to(device)

    return AttentionWork(
        units=tensor(np.concatenate((parts, whole))),
        merges=tensor(merges),
        tables=tensor(tables),
        num_parts=num_parts,
        end_block=int(tables.max(initial=-1)) + 1,
    )


def _tiles_to_cut(num_splits: Int32s, programs_per_tile: int) -> int:
    """How many tiles, the longest first, are cut into their splits: those of more than one, while
    programs are few and parts within their bound."""
    if len(num_splits) * programs_per_tile >= ENOUGH_PROGRAMS:
        return 0
    fits = np.cumsum(num_splits) * programs_per_tile <= MAX_PARTS
    return int((fits & (num_splits > 1)).sum())


def _tiles(plan: AttentionPlan, queries: int) -> tuple[Int32s, Int32s]:
    """Units that are whole tiles, and the block tables. Raises IndexError when one is too short."""
    tiles = [np.empty((0, UNIT_COLUMNS), dtype=np.int32)]
    tables = [np.empty(0, dtype=np.int32)]
    row = table_start = 0
    for each in plan.rows:
        begins = np.arange(0, each.num_tokens, queries, dtype=np.int32)
        tile = np.empty((len(begins), UNIT_COLUMNS), dtype=np.int32)
        positions = each.start + begins
        first_keys = 0 if plan.window is None else np.maximum(positions - plan.window + 1, 0)
        tile[:, ROW] = row + begins
        tile[:, POSITION] = positions
        tile[:, QUERIES] = np.minimum(queries, each.num_tokens - begins)
        tile[:, TABLE] = table_start
        tile[:, FIRST] = first_keys // SPLIT_KEYS
        tile[:, END] = -(-(positions + tile[:, QUERIES]) // SPLIT_KEYS)
        tile[:, PART] = -1
        tiles.append(tile)
        table = np.asarray(each.blocks, dtype=np.int32)
        if len(table) * plan.block_size < each.start + each.num_tokens:
            raise IndexError(
                f"{len(table)} blocks do not reach {each.start + each.num_tokens} keys"
            )
        tables.append(table)
        table_start += len(table)
        row += each.num_tokens
    return np.concatenate(tiles), np.concatenate(tables)
