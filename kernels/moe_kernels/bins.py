"""Memory for rows of tokens on their way between ranks.

A bin holds what one rank sends for its t tokens: a header of t·K int32, the slot at the receiver
for each choice or −1 ("not yours"), padded to 16 bytes, then the rows of those tokens that have a
slot in the header, in order of token. Every rank knows t and K from elsewhere.

Neighbour: `dispatch` packs and unpacks.

Letters: t tokens of one rank, K choices a token, B bins, P (row, choice) pairs, H hidden, S slots a
rank, Q sources of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_kernels.derived import Derived

_ALIGNMENT_BYTES = 16
HEADER_DTYPE = torch.int32


class ForeignSlot(ValueError):
    """A header names a slot that the receiver has not."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(f"a rank sent rows for slots past the {num_slots} here: tables differ")


@dataclass(frozen=True)
class BinLayout:
    hidden: int
    top_k: int
    dtype: torch.dtype
    """Of rows on their way: what the experts store, to which their products round in any case."""

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.dtype.itemsize

    def header_bytes(self, num_tokens: int) -> int:
        raw = num_tokens * self.top_k * HEADER_DTYPE.itemsize
        return -(-raw // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def used_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Of a bin for so many tokens, so many of which have a row in it."""
        return self.header_bytes(num_tokens) + num_rows * self.row_bytes

    def bin_bytes(self, num_tokens: int) -> int:
        """A whole number of rows and headers' units, whatever of both is in it."""
        raw = self.used_bytes(num_tokens, num_tokens)
        return -(-raw // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


@dataclass(frozen=True, eq=False)
class Bins:
    memory: Tensor
    """uint8 [B, bytes], contiguous."""
    layout: BinLayout
    derived: Derived = field(default_factory=Derived)

    @classmethod
    def allocate(cls, count: int, num_tokens: int, layout: BinLayout, device: torch.device) -> Bins:
        shape = (count, layout.bin_bytes(num_tokens))
        return cls(torch.empty(shape, dtype=torch.uint8, device=device), layout)


@dataclass(frozen=True)
class Unpacked:
    """What the experts of this rank have to do, and whose it is."""

    rows_PH: Tensor
    """float32, sorted by slot; within a slot by source, token, choice."""
    offsets: Tensor
    """int64 [S+1]: slot s owns rows offsets[s]:offsets[s+1]."""
    row_P: Tensor
    """int64: for every pair, in order of source, token, choice, its row in `rows_PH`."""
    pairs_Q: tuple[int, ...]
    """Pairs of each source."""
