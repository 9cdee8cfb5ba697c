"""Who owns which KV block. No torch: ids and counts only.

A block is *used* while somebody holds it (owners are counted, so several sequences may share one),
*cached* when nobody does but its content is known and may be asked for again, else *free*. Cached
blocks are given away when no block is free, the one that was let go longest ago first. An owner
lets go of a chain from its end, so a block always goes before the blocks it continues.

Neighbours: `prefix_index` knows the contents, `block_tables` takes and returns blocks, `kv` holds
their bytes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from moe_worker.engine.prefix_index import Prefix, PrefixIndex


class OutOfBlocks(Exception):
    """Fewer blocks can be had than were asked for; nothing was taken."""


class BlockPool:
    def __init__(self, num_blocks: int, prefixes: PrefixIndex | None = None) -> None:
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least 1 block, got {num_blocks}")
        self.prefixes = PrefixIndex() if prefixes is None else prefixes
        self._ref_counts = [0] * num_blocks
        # A stack whose top is the lowest id: neighbours in time become neighbours in memory.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Known blocks without an owner, the next to be evicted first."""

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """What `take` could give: free blocks and, after them, cached ones."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def take(self, count: int) -> list[int]:
        """`count` blocks with one owner each and no known content, or OutOfBlocks and nothing
        taken."""
        if count > self.num_available:
            raise OutOfBlocks(f"{count} KV blocks asked for, {self.num_available} can be had")
        taken = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more owner for each; only used and cached blocks can be shared."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                assert block in self._cached, f"block {block} is free and cannot be shared"
                del self._cached[block]
            self._ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One owner less for each; the last owner's blocks become cached if their content is known,
        else free. Blocks of a chain come in reverse order."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is released more than it is held"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                if self.prefixes.holds(block):
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def keep(self, parent: Prefix | None, tokens: bytes, block: int) -> Prefix | None:
        """Know a used, completely written block by its content, so that it is cached when its last
        owner lets go. None when it cannot be kept; see `PrefixIndex.add`."""
        assert self._ref_counts[block] > 0, f"block {block} is not in use and cannot be kept"
        return self.prefixes.add(parent, tokens, block)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def forget(self) -> None:
        """Nothing written until now is found again; owners keep their blocks."""
        self.prefixes.clear()
        self._free += self._cached
        self._cached.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Free, cached and used make up the pool, and the counts are exactly what `tables` hold."""
        held = Counter(block for table in tables for block in table)
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        for block, count in enumerate(self._ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} owners, count {count}"
            places = (count > 0) + (block in free) + (block in self._cached)
            assert places == 1, f"block {block}: in {places} of used, free and cached"
        assert held.keys() <= set(range(self.num_blocks)), "a table names an unknown block"
        assert all(map(self.prefixes.holds, self._cached)), "a cached block has no known content"
        assert not any(map(self.prefixes.holds, free)), "a free block has a known content"
        self.prefixes.check_integrity()

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.prefixes.drop(block)
        return block
