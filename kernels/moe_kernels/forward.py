"""A whole model's step in one operation, where all its layers go at once: token ids to logits.

A rank that is alone and decodes a few tokens spends more between the operations than on some of
them, so an implementation may do all of it in one call. What it computes is `composed`: the ends of
the model around its layers, with the same bits.
Neighbours: `stack` has the layers, `head` the ends, `step_tokens` the step; the worker's expert
layers call this.

Letters: P positions, F rotated pairs of a head, B rows that are sampled, V vocabulary, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.implementation import implemented
from moe_kernels.stack import Counts, IntArray, Stack, run_stack
from moe_kernels.step_tokens import StepTokens


@dataclass(frozen=True, eq=False)
class Ends:
    """What a model has around its layers, and the angles that all of them turn by."""

    embedding: Embedding
    cos_PF: Tensor
    sin_PF: Tensor
    """Float32, of every position that a token may have."""
    head: Head

    def attention_step(self, tokens: StepTokens) -> AttentionStep:
        """Raises IndexError for a position past the last, or a block table that is too short."""
        positions_T, slots_T = tokens.places()
        angles = self.cos_PF[positions_T], self.sin_PF[positions_T]
        return AttentionStep(*angles, slots_T, tokens.plan)


@implemented
def forward(
    tokens: StepTokens, ends: Ends, stack: Stack, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """Logits float32 [B, V] of the step's sampled rows, and what the layers counted; the tokens'
    keys and values are written to the pages. There may be no tokens.

    Args:
        turn_L: int64, of `place_choices` in each layer.

    Raises:
        IndexError: a token id, a position, a block or a sampled row does not exist, or a block
            table is too short.
    """
    return composed(tokens, ends, stack, turn_L)


@torch.inference_mode()
def composed(
    tokens: StepTokens, ends: Ends, stack: Stack, turn_L: IntArray
) -> tuple[Tensor, Counts]:
    """`forward` by the contracts of its parts."""
    x_TH = embed(tokens.ids_T, ends.embedding)
    x_TH, counts = run_stack(x_TH, stack, ends.attention_step(tokens), turn_L)
    return head_logits(x_TH, tokens.sample_rows_B, ends.head), counts
