"""A schedule as the tensors one forward pass needs.

Built once per step and read by every layer, so that the model's code keeps the paper's signature.
Neighbours: `scheduler` decides what is in it, `runner` builds it, `moe_worker.model.transformer`
computes it.

Letters: T tokens of the step, B tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan, AttentionRows, plan_attention
from moe_worker.engine.logit_rows import rows_of
from moe_worker.engine.schedule import Schedule


@dataclass(frozen=True)
class Batch:
    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    """Where each token's keys and values go: block · block_size + offset."""
    sample_rows_B: Tensor
    """Rows whose logits are wanted, see `logit_rows`."""
    attention: AttentionPlan

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


def build_batch(schedule: Schedule, block_size: int, device: str | torch.device = "cpu") -> Batch:
    """Tokens of the schedule's sequences one after another; an empty schedule gives T = 0."""
    token_ids: list[int] = []
    sample_rows: list[int] = []
    rows: list[AttentionRows] = []
    for entry in schedule.entries:
        seq, skew = entry.seq, len(token_ids) - entry.start
        token_ids += seq.tokens(entry.start, entry.end)
        rows.append(AttentionRows(entry.start, entry.num_tokens, seq.block_table))
        sample_rows += [skew + row.position for row in rows_of(entry)]
    plan = plan_attention(rows, block_size, device)
    positions_T, slots_T = plan.table.slots(block_size)
    return Batch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=torch.from_numpy(positions_T).to(device),
        slots_T=torch.from_numpy(slots_T).to(device),
        sample_rows_B=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        attention=plan,
    )
