"""One generation: what was asked, what has come out, and what the cache holds of it. No torch.

Neighbours: `scheduler` moves sequences along, `batch` reads them, the engine reports them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 0.0
    """0 = greedy."""
    top_p: float = 1.0
    seed: int = 0
    """Noise is a pure function of the seed and a token's position."""
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


@dataclass(eq=False)
class Sequence:
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    """Tokens generated so far, without the stop token."""
    block_table: list[int] = field(default_factory=list)
    """KV blocks held, in order of position."""
    num_computed: int = 0
    """Tokens whose keys and values lie in those blocks."""
    finish_reason: FinishReason | None = None
    arrival: int = -1
    """Order of arrival, given by the scheduler; the oldest is never preempted."""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError(f"request {self.request_id}: the prompt is empty")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt) + self.params.max_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start ≤ p < end."""
        num_prompt = len(self.prompt)
        return [
            *self.prompt[start:end],
            *self.output[max(0, start - num_prompt) : max(0, end - num_prompt)],
        ]
