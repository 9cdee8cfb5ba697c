"""The block table of a sequence: what it finds in the prefix cache, takes, fills and gives back.

A sequence shares the full blocks that were written with its own first tokens, and computes the
rest, beginning with the first token whose logits are wanted: the last one, from which a next token
is drawn. When a known block holds that token too, the sequence gets a copy of it and writes into
that, so nobody ever writes into a block that is known or has another owner.

Neighbours: `scheduler` decides who begins, grows and ends; `blocks` counts owners and evicts;
`kv` copies the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from moe_worker.engine.blocks import BlockPool
from moe_worker.engine.prefix_index import Prefix, pack
from moe_worker.engine.sequence import Sequence


@dataclass(frozen=True)
class Start:
    """How a sequence could begin: with blocks that are known, and new ones for its other tokens."""

    known: tuple[Prefix, ...]
    """Chain of blocks to share, in order of position."""
    copied: Prefix | None
    """The block after them, to be copied into the first new one."""
    num_new: int
    num_cached_tokens: int
    """Tokens that need not be computed."""


class BlockTables:
    def __init__(self, pool: BlockPool, block_size: int, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._sought: tuple[Sequence, list[Prefix]] | None = None
        """Who was last looked up and what was found: the head of the queue asks in every step."""

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def starts(self, seq: Sequence) -> tuple[Start, ...]:
        """Ways to begin, the one with the least to compute first. The last of them fits whenever
        nobody else runs."""
        chain = self._chain(seq)
        whole, rest = divmod(seq.first_wanted, self.block_size)
        known = tuple(chain[:whole])
        num_blocks = self.blocks_for(seq.num_tokens)
        plain = Start(known, None, num_blocks - len(known), len(known) * self.block_size)
        if rest == 0 or len(chain) <= whole:
            return (plain,)
        return (Start(known, chain[whole], plain.num_new, seq.first_wanted), plain)

    def num_taken(self, start: Start) -> int:
        """Blocks that are available before and not after this start."""
        ends = (*start.known, start.copied) if start.copied else start.known
        return start.num_new + sum(self.pool.is_cached(prefix.block) for prefix in ends)

    def begin(self, seq: Sequence, start: Start) -> None:
        """Fill the empty table of `seq`. Raises OutOfBlocks, and then nothing is changed."""
        held = [prefix.block for prefix in start.known]
        if start.copied is not None:
            held.append(start.copied.block)
        self._sought = None
        # Shared before anything is taken, else it might be evicted to make room.
        self.pool.share(held)
        try:
            new = self.pool.take(start.num_new)
        except BaseException:
            self.pool.release(reversed(held))
            raise
        seq.block_table = [prefix.block for prefix in start.known] + new
        seq.copied_from = start.copied.block if start.copied is not None else None
        seq.prefix = start.known[-1] if start.known else None
        seq.num_computed = start.num_cached_tokens

    def copy_for(self, seq: Sequence) -> tuple[int, int] | None:
        """What has to be copied before the next token of `seq` is computed: from and to."""
        if seq.copied_from is None:
            return None
        return seq.copied_from, seq.block_table[seq.num_computed // self.block_size]

    def num_missing(self, seq: Sequence) -> int:
        """Blocks that its tokens need beyond those it has."""
        return self.blocks_for(seq.num_tokens) - len(seq.block_table)

    def grow(self, seq: Sequence) -> None:
        """Room for all its tokens. Raises OutOfBlocks."""
        seq.block_table += self.pool.take(self.num_missing(seq))

    def record(self, seq: Sequence) -> None:
        """After a step: let go of what was copied, and make blocks known that have become full.

        When another sequence has made the same content known before, its block takes the place of
        the own one: equal bytes, held once.
        """
        if seq.copied_from is not None:
            self.pool.release([seq.copied_from])
            seq.copied_from = None
        if not self.prefix_caching:
            return
        at = seq.prefix.num_blocks if seq.prefix is not None else 0
        while (at + 1) * self.block_size <= seq.num_computed:
            tokens, own = self._block_tokens(seq, at), seq.block_table[at]
            known = self.pool.prefixes.find(seq.prefix, tokens)
            if known is not None:
                self.pool.share([known.block])
                self.pool.release([own])
                seq.block_table[at] = known.block
            else:
                known = self.pool.keep(seq.prefix, tokens, own)
            if known is None:
                return
            seq.prefix, at = known, at + 1

    def release(self, seq: Sequence) -> None:
        """Let go of everything; what is known stays cached."""
        if seq.copied_from is not None:
            self.pool.release([seq.copied_from])
        self.pool.release(reversed(seq.block_table))
        seq.block_table, seq.copied_from, seq.prefix, seq.num_computed = [], None, None, 0

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """The pool's counts are these sequences' tables, each with room for what is computed."""
        tables = []
        for seq in seqs:
            copied = [] if seq.copied_from is None else [seq.copied_from]
            tables.append([*seq.block_table, *copied])
            room = len(seq.block_table) * self.block_size
            assert seq.num_computed <= room, f"{seq.request_id} computed past its blocks"
            known = seq.prefix
            while known is not None:
                assert seq.block_table[known.num_blocks - 1] == known.block, seq.request_id
                known = known.parent
        self.pool.check_integrity(tables)

    def _chain(self, seq: Sequence) -> list[Prefix]:
        """The full blocks of its tokens that are known, from the first to the first unknown one."""
        if not self.prefix_caching:
            return []
        if self._sought is None or self._sought[0] is not seq:
            self._sought = seq, []
        chain = self._sought[1]
        # Blocks are forgotten from the end of a chain: where one is known, so are those before.
        while chain and not self.pool.prefixes.knows(chain[-1]):
            chain.pop()
        for at in range(len(chain), seq.num_tokens // self.block_size):
            parent = chain[-1] if chain else None
            known = self.pool.prefixes.find(parent, self._block_tokens(seq, at))
            if known is None:
                break
            chain.append(known)
        return chain

    def _block_tokens(self, seq: Sequence, at: int) -> bytes:
        """What has to be equal: the tokens, and for a first block who may share it."""
        tokens = pack(seq.tokens(at * self.block_size, (at + 1) * self.block_size))
        # All blocks have as many tokens, so no salt and tokens can be read as another salt's.
        return tokens if at else seq.params.cache_salt.encode() + tokens
