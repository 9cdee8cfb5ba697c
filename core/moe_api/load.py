"""LoadReport: what a worker counted, cumulative since its incarnation began.

Read by the operator over the control API and windowed by `moe_placement.decision.window`.
"""

from __future__ import annotations

from pydantic import Field

from moe_api.document import Document


class LoadReport(Document):
    incarnation: str
    """A new value means that all counters began again at zero."""
    member: int = Field(ge=0)
    generation: int = Field(ge=0)
    epoch: int = Field(ge=0)
    """Epoch whose routing was in force when the counters were read."""
    monotonic_seconds: float
    routed: list[list[int]]
    """[layers][logical experts]: tokens of this rank's own requests (no padding, no warm-up)
    that chose the expert; summed over ranks it is the true load, counted once."""
    served: list[list[int]]
    """[layers][local slots]: tokens each physical slot here received, from all ranks."""
    steps: int = 0
    max_step_gap_millis: float = 0.0
    """Longest gap between two busy steps since the epoch in force began."""
    median_step_gap_millis: float = 0.0
    invalid_expert_ids: int = 0
