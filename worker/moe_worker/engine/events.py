"""What the engine tells a request: its tokens, then exactly one end. And why it takes none.

Made by `engine` in its own thread, consumed by `server`; nothing here knows HTTP or torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token; a stop token is not sent as one."""

    token_id: int
    index: int
    """Place in the generated text, from 0."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every submitted request."""

    reason: FinishReason
    message: str | None
    """What went wrong, for reason "error"."""
    prompt_tokens: int
    completion_tokens: int
    """Tokens sent as `Token`."""


Event = Token | Finished
EventSink = Callable[[Event], None]
"""Called from the engine thread; must not block."""


class NotAdmitting(RuntimeError):
    """This worker takes no new request now; `reason` is one word for the logs."""

    def __init__(self, reason: str, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds
