"""What one step computes: pieces of sequences, in the order of the batch's rows. No torch.

Neighbours: `scheduler` makes it, `batch` turns it into tensors, `runner` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_worker.engine.sequence import Sequence


class ScheduledSequence(NamedTuple):
    seq: Sequence
    start: int
    """Position of the first token to compute."""
    num_tokens: int
    samples: bool
    """The last token to compute is the newest one, so a next token is drawn."""
    copy: tuple[int, int] | None = None
    """Block to copy, and the block of the sequence to copy it into, before the step computes."""

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True)
class Schedule:
    entries: tuple[ScheduledSequence, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)

    @property
    def num_samples(self) -> int:
        return sum(entry.samples for entry in self.entries)

    @property
    def copies(self) -> tuple[tuple[int, int], ...]:
        """Blocks to copy, from and to, before the step computes."""
        return tuple(entry.copy for entry in self.entries if entry.copy is not None)
