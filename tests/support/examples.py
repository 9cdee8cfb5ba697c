"""How many examples a property is tried with: few where kernels run in Triton's interpreter."""

from __future__ import annotations

from moe_kernels.implementation import is_interpreted

SHARE_INTERPRETED = 20


def examples(many: int) -> int:
    return max(2, many // SHARE_INTERPRETED) if is_interpreted() else many
