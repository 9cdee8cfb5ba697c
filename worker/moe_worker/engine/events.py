"""What the engine tells a request: its prompt, its tokens, exactly one end. And why it takes none.

Made by `engine` in its own thread, consumed by `server`; nothing here knows HTTP or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How probable a token was: natural logarithms, -inf for what was impossible."""

    token_id: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...] = ()
    """The most probable tokens with their logarithms, the most probable first."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt is computed: comes once, before the first token."""

    cached_tokens: int
    """Tokens of the prompt whose keys and values were found in the prefix cache."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the prompt's tokens from the second on, for requests that want them."""


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; a stop token is not sent as one."""

    token_id: int
    index: int
    """Place in the generated text, from 0."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every submitted request."""

    reason: FinishReason
    message: str | None
    """What went wrong, for reason "error"."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens sent as `Token`."""


Event = Prompt | Token | Finished
EventSink = Callable[[Event], None]
"""Called from the engine thread; must not block."""


class NotAdmitting(RuntimeError):
    """This worker takes no new request now; `reason` is one word for the logs."""

    def __init__(self, reason: str, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
