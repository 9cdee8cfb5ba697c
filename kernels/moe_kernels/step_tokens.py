"""The tokens of one step as plain numbers: all that a model is told of a step.

Sequence after sequence, in the order of the rows that are computed of them. What single operations
take of a step is made of these numbers when it is first asked for; who computes the whole model in
one call needs none of it.
Neighbours: `moe_worker.engine.batch` makes one, `forward` takes it.

Letters: T tokens, S sequences, C columns, B tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan, Int64s, RowTable


@dataclass(frozen=True, eq=False)
class StepTokens:
    """May be without tokens."""

    ids: Int64s
    spans_SC: Int64s
    """A line for each sequence: position of its first token here, how many, blocks of its table."""
    blocks: Int64s
    """All block tables one after another, each at least up to its sequence's last token here."""
    sample_rows: Int64s
    """Rows of the tokens whose logits are wanted."""
    block_size: int
    device: str | torch.device = "cpu"
    """Where tensors of it shall be."""

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @cached_property
    def plan(self) -> AttentionPlan:
        """Raises IndexError where a block table is too short."""
        table = RowTable.of_spans(self.spans_SC, self.blocks, self.block_size)
        return AttentionPlan(table, self.block_size, self.device)

    @property
    def ids_T(self) -> Tensor:
        return self._tensor(self.ids)

    @property
    def sample_rows_B(self) -> Tensor:
        return self._tensor(self.sample_rows)

    def places(self) -> tuple[Tensor, Tensor]:
        """Position and slot (block · block_size + offset) of every token, int64 [T].

        Raises:
            IndexError: a block table is too short.
        """
        positions, slots = self.plan.table.slots(self.block_size)
        return self._tensor(positions), self._tensor(slots)

    def _tensor(self, numbers: Int64s) -> Tensor:
        return torch.from_numpy(numbers).to(self.device)
