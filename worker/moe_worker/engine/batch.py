"""A schedule as the plain numbers that one forward pass needs.

Neighbours: `scheduler` decides what is in it, `runner` builds it, `moe_worker.model.transformer`
computes it.
"""

from __future__ import annotations

import numpy as np
import torch

from moe_kernels.step_tokens import StepTokens
from moe_worker.engine.logit_rows import positions_of
from moe_worker.engine.schedule import Schedule


def build_batch(
    schedule: Schedule, block_size: int, device: str | torch.device = "cpu"
) -> StepTokens:
    """Tokens of the schedule's sequences one after another; an empty schedule has none. Logits are
    wanted of the rows of `logit_rows`."""
    ids: list[int] = []
    spans: list[int] = []
    blocks: list[int] = []
    sample_rows: list[int] = []
    for entry in schedule.entries:
        seq, start, num_tokens, _, _ = entry
        skew = len(ids) - start
        ids += seq.tokens(start, start + num_tokens)
        spans += (start, num_tokens, len(seq.block_table))
        blocks += seq.block_table
        for position in positions_of(entry):
            sample_rows.append(skew + position)
    return StepTokens(
        ids=np.array(ids, np.int64),
        spans_SC=np.array(spans, np.int64).reshape(-1, 3),
        blocks=np.array(blocks, np.int64),
        sample_rows=np.array(sample_rows, np.int64),
        block_size=block_size,
        device=device,
    )
