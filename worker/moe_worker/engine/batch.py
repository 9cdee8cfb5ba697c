"""A schedule as the tensors one forward pass needs.

Built once per step and read by every layer, so that the model's code keeps the paper's signature.
Neighbours: `scheduler` decides what is in it, `runner` builds it, `moe_worker.model.transformer`
computes it.

Letters: T tokens of the step, B tokens whose logits are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan, AttentionRows, plan_attention
from moe_worker.engine.logit_rows import positions_of
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
        seq, start, num_tokens, _, _ = entry
        skew = len(token_ids) - start
        token_ids += seq.tokens(start, start + num_tokens)
        rows.append(AttentionRows(start, num_tokens, seq.block_table))
        for position in positions_of(entry):
            sample_rows.append(skew + position)
    plan = plan_attention(rows, block_size, device)
    positions_T, slots_T = plan.table.slots(block_size)
    return Batch(
        token_ids_T=_tensor(token_ids, device),
        positions_T=_tensor(positions_T, device),
        slots_T=_tensor(slots_T, device),
        sample_rows_B=_tensor(sample_rows, device),
        attention=plan,
    )


def _tensor(numbers: list[int] | npt.NDArray[np.int64], device: str | torch.device) -> Tensor:
    return torch.from_numpy(np.asarray(numbers, dtype=np.int64)).to(device)
