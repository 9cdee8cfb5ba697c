"""How many examples a property is tried with: few where kernels run in Triton's interpreter or are
compiled for the shapes of every example."""

from __future__ import annotations

import torch

from moe_kernels.implementation import is_interpreted

SHARE_INTERPRETED = 20
SHARE_COMPILED = 8


def examples(many: int) -> int:
    share = SHARE_INTERPRETED if is_interpreted() else SHARE_COMPILED
    return max(2, many // share) if is_interpreted() or torch.cuda.is_available() else many
