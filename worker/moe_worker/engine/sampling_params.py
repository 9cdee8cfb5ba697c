"""What a request wants of the tokens it gets. Checked by `api.prepare` for the client's sake, and
here again so that nothing impossible can reach a step.

Neighbours: `sampler` carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_kernels.sampling import Cut


class GrammarFailed(RuntimeError):
    """A grammar can not say what may come next; only its own request ends."""


class Grammar(Protocol):
    """What an output may go on with. Each sequence has its own, because it follows the tokens."""

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Which tokens [vocabulary] may follow `output`; the end is one of them.

        `output` is the same as at the last call or a continuation of it.
        Raises GrammarFailed.
        """
        ...


@dataclass(frozen=True)
class SamplingParams:
    max_tokens: int
    temperature: float = 0.0
    """0 = greedy."""
    top_k: int = 0
    """0 = all."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    """Noise is a pure function of the seed and a token's position."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """By token id."""
    num_logprobs: int | None = None
    """Alternatives to report with each token's probability; None = report nothing, 0 = only the
    token's own."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which must be computed for it, cached or not."""
    grammar: Grammar | None = None
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str = ""
    """Only requests with the same one share cached blocks. No number depends on it."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (all) or more, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")
        if not self.repetition_penalty > 0.0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")

    @cached_property
    def cut(self) -> Cut:
        return Cut(self.temperature, self.top_k, self.top_p, self.min_p)

    @cached_property
    def has_penalties(self) -> bool:
        return (self.frequency_penalty, self.presence_penalty, self.repetition_penalty) != (0, 0, 1)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether its tokens are chosen from other logits than the model's."""
        return self.has_penalties or bool(self.logit_bias) or self.grammar is not None

    @cached_property
    def is_plain(self) -> bool:
        """Tokens are drawn from the model's logits and told without their probabilities."""
        return not self.adjusts_logits and self.num_logprobs is None
