"""A schedule as the tensors one forward pass needs.

Built once per step and read by every layer, so that the model's code keeps the paper's signature.
Neighbours: `scheduler` decides what is in it, `runner` builds it, `moe_worker.model.transformer`
computes it.

Letters: T tokens of the step, B tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
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
    positions: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [np.empty(0, dtype=np.int64)]
    slots: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [np.empty(0, dtype=np.int64)]
    sample_rows: list[int] = []
    rows: list[AttentionRows] = []
    for entry in schedule.entries:
        end = entry.start + entry.num_tokens
        token_ids += entry.seq.tokens(entry.start, end)
        at = np.arange(entry.start, end, dtype=np.int64)
        table = np.asarray(entry.seq.block_table, dtype=np.int64)
        positions.append(at)
        slots.append(table[at // block_size] * block_size + at % block_size)
        rows.append(AttentionRows(entry.start, entry.num_tokens, entry.seq.block_table))
        first = len(token_ids) - end
        sample_rows += [first + row.position for row in rows_of(entry)]
    return Batch(
        token_ids_T=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions_T=torch.from_numpy(np.concatenate(positions)).to(device),
        slots_T=torch.from_numpy(np.concatenate(slots)).to(device),
        sample_rows_B=torch.tensor(sample_rows, dtype=torch.int64, device=device),
        attention=plan_attention(rows, block_size, device),
    )
