"""Which full KV block holds which tokens after which prefix. No torch, no reference counts.

Keys and values of a token depend on it and the tokens before it, and on nothing else that changes
while a worker lives: the weights and the format of the cache are one per process, and neither rank,
placement, chunk nor company changes a number. So a block is known by a chain: the digest of its
parent's digest and its own tokens. A digest only finds a candidate, whose tokens and parent are
then compared; when two contents share a digest, one of them is simply not kept.

Neighbours: `blocks` drops what it evicts, `block_tables` walks chains for sequences.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import blake2b

_DIGEST_BYTES = 16

Digest = Callable[[bytes, bytes], bytes]


@dataclass(frozen=True, eq=False, slots=True)
class Prefix:
    """A full block and, through its parents, every token up to its end."""

    parent: Prefix | None
    tokens: bytes
    """Its own tokens, packed; of a first block, after the salt of those who may share it."""
    digest: bytes
    block: int
    num_blocks: int
    """Blocks of the chain, this one included."""


def pack(token_ids: Iterable[int]) -> bytes:
    """Token ids, each below 2^32, as bytes that are cheap to compare and to hash."""
    return array("I", token_ids).tobytes()


def chain_digest(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest()


class PrefixIndex:
    def __init__(self, digest: Digest = chain_digest) -> None:
        self._digest = digest
        self._by_digest: dict[bytes, Prefix] = {}
        self._by_block: dict[int, Prefix] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def find(self, parent: Prefix | None, tokens: bytes) -> Prefix | None:
        """The block with exactly these tokens after exactly this prefix."""
        found = self._by_digest.get(self._digest_after(parent, tokens))
        if found is None or found.parent is not parent or found.tokens != tokens:
            return None
        return found

    def add(self, parent: Prefix | None, tokens: bytes, block: int) -> Prefix | None:
        """Know `block` by its content; None when it cannot be: its digest is taken, or its prefix
        is not known any more."""
        digest = self._digest_after(parent, tokens)
        if digest in self._by_digest or (parent is not None and not self.knows(parent)):
            return None
        assert block not in self._by_block, f"block {block} is known by two contents"
        num_blocks = 1 if parent is None else parent.num_blocks + 1
        prefix = Prefix(parent, tokens, digest, block, num_blocks)
        self._by_digest[digest] = self._by_block[block] = prefix
        return prefix

    def holds(self, block: int) -> bool:
        return block in self._by_block

    def drop(self, block: int) -> None:
        """Forget a block that is known; chains through it are not found any more."""
        prefix = self._by_block.pop(block)
        del self._by_digest[prefix.digest]

    def clear(self) -> None:
        self._by_digest.clear()
        self._by_block.clear()

    def check_integrity(self) -> None:
        """Both ways in agree, and every chain is whole down to its first block."""
        assert len(self._by_digest) == len(self._by_block), "a block is known by two contents"
        for block, prefix in self._by_block.items():
            assert prefix.block == block, f"block {block} is kept as {prefix.block}"
            assert self._by_digest[prefix.digest] is prefix, f"block {block} has another's digest"
            assert prefix.digest == self._digest_after(prefix.parent, prefix.tokens)
            parent = prefix.parent
            assert parent is None or self.knows(parent), f"block {block} outlives its prefix"

    def knows(self, prefix: Prefix) -> bool:
        """Whether it is still found, and then every block before it is too."""
        return self._by_block.get(prefix.block) is prefix

    def _digest_after(self, parent: Prefix | None, tokens: bytes) -> bytes:
        return self._digest(b"" if parent is None else parent.digest, tokens)
