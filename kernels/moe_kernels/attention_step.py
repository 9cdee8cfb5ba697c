"""What every layer's attention takes of a step besides hidden states and pages.

Made once per step: what implementations view or check of it is made once, too, and kept in
`derived`.
Neighbours: `attention_plan` says which keys each token sees, `grouped_query` and
`moe_worker.model.mla` take a step.

Letters: T tokens, F rotated pairs of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from moe_kernels.attention_plan import AttentionPlan
from moe_kernels.derived import Derived


@dataclass(frozen=True)
class AttentionStep:
    cos_TF: Tensor
    sin_TF: Tensor
    """Float32, of each token's position, see `norm_rope.rope_table`."""
    slots_T: Tensor
    """Int64, where each token's keys and values go, see `kv_pages.append`."""
    plan: AttentionPlan
    derived: Derived = field(default_factory=Derived, init=False, compare=False, repr=False)
