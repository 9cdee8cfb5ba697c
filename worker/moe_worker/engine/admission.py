"""Whether the next in the queue begins in this step, and with which blocks. Decides, changes
nothing.

Neighbours: `scheduler` asks for the head of its queue only, `block_tables` knows the ways to begin.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_worker.engine.block_tables import BlockTables, Start
from moe_worker.engine.schedule import ScheduledSequence
from moe_worker.engine.sequence import Sequence


def start_for(
    newcomer: Sequence,
    tables: BlockTables,
    pieces: Iterable[ScheduledSequence],
    num_running: int,
    max_batched_tokens: int,
) -> Start | None:
    """The start with the least to compute that fits; None when the newcomer has to wait.

    `pieces` are the parts of prompts that are in this step already, `num_running` sequences hold
    blocks and grow.
    """
    for start in tables.starts(newcomer):
        num_steps = -(-_num_to_compute(newcomer, start) // (max_batched_tokens - num_running))
        headroom = num_running * tables.blocks_for(num_steps)
        # Blocks that those who run may ask for until the newcomer draws its first token stay there,
        # else it, being the youngest, would be preempted for nothing.
        room = tables.pool.num_available - headroom
        if start.num_new <= room and tables.num_taken(start) <= room:
            return None if _is_under_way(newcomer, start, tables, pieces) else start
    return None


def _num_to_compute(newcomer: Sequence, start: Start) -> int:
    return newcomer.num_tokens - start.num_cached_tokens


def _is_under_way(
    newcomer: Sequence, start: Start, tables: BlockTables, pieces: Iterable[ScheduledSequence]
) -> bool:
    """Whether this step fills the block that the newcomer would compute first: in the next step it
    finds it. In a step with room for a newcomer all pieces are last ones, so it waits for one step,
    and again only if an older sequence begins before it."""
    end = start.num_cached_tokens + tables.block_size
    is_of_use = start.num_cached_tokens < newcomer.first_wanted and end <= newcomer.num_tokens
    if not tables.prefix_caching or not is_of_use:
        return False
    tokens = newcomer.tokens(0, end)
    return any(piece.end >= end and piece.seq.tokens(0, end) == tokens for piece in pieces)
