"""Draw the next tokens of a step: a schedule's parameters beside the model's logits.

Neighbours: `moe_kernels.sampling` is the arithmetic; `runner` calls this once per step.
"""

from __future__ import annotations

from torch import Tensor

from moe_kernels.sampling import sample
from moe_worker.engine.schedule import Schedule


def draw(logits_BV: Tensor, schedule: Schedule) -> dict[str, int]:
    """Token by request id for the sequences that sample, in the order of the logits' rows."""
    seqs = [entry.seq for entry in schedule.entries if entry.samples]
    if not seqs:
        return {}
    tokens_B = sample(
        logits_BV,
        temperature_B=[seq.params.temperature for seq in seqs],
        top_p_B=[seq.params.top_p for seq in seqs],
        seeds_B=[seq.params.seed for seq in seqs],
        positions_B=[seq.num_tokens for seq in seqs],
    )
    return {seq.request_id: token for seq, token in zip(seqs, tokens_B.tolist(), strict=True)}
