"""Who owns which KV block. No torch: ids and counts only.

Blocks are counted references, so that several sequences may hold one; a block is free again when
the last owner lets go. Neighbours: `scheduler` takes and returns blocks, `kv` holds their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are free than were asked for; nothing was taken."""


class BlockPool:
    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least 1 block, got {num_blocks}")
        self._ref_counts = [0] * num_blocks
        # A stack whose top is the lowest id: neighbours in time become neighbours in memory.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` blocks with one owner each, or OutOfBlocks and nothing taken."""
        if count > self.num_free:
            raise OutOfBlocks(f"{count} KV blocks asked for, {self.num_free} are free")
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; only blocks in use can be shared."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free and cannot be shared"
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each; the last owner's blocks become free."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released more than it is held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Free and used make up the pool, and the counts are exactly what `tables` hold."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, count in enumerate(self._ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} owners, count {count}"
            assert (count == 0) == (block in free), f"block {block}: count {count}, free list wrong"
        assert held.keys() <= set(range(self.num_blocks)), "a table names an unknown block"
