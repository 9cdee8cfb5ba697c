"""One generation: what was asked, what has come out, and what the cache holds of it. No torch.

Neighbours: `scheduler` moves sequences along, `batch` reads them, the engine reports them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from moe_worker.engine.events import TokenLogprobs
from moe_worker.engine.prefix_index import Prefix
from moe_worker.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


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
    prefix: Prefix | None = None
    """The last of its first blocks that others can find; see `block_tables`."""
    copied_from: int | None = None
    """Block held until the step has run that copies it into the first block to be written."""
    num_starts: int = 0
    """Times it was given blocks: 1, and once more after each preemption."""
    num_cached_tokens: int = 0
    """Tokens of the prompt found in the prefix cache when it first began."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of the prompt's tokens from the second on, as far as they are known; see SamplingParams."""
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

    @property
    def first_wanted(self) -> int:
        """Position of the first token whose logits are still wanted; what the cache holds of the
        tokens before need not be computed."""
        num_known = len(self.prompt_logprobs)
        if self.params.prompt_logprobs is not None and num_known < len(self.prompt) - 1:
            return num_known
        return self.num_tokens - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids of positions start ≤ p < end."""
        num_prompt = len(self.prompt)
        if start >= num_prompt:
            return self.output[start - num_prompt : end - num_prompt]
        return [*self.prompt[start:end], *self.output[: max(0, end - num_prompt)]]
