"""One answer as its events come: which bring text, how it ends, what usage says.

Pure. Reads what OpenAI's servers and their likes send, and is strict only where a mistake would
make a figure wrong. Neighbours: `sse` finds the events, `client` gives them their time.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

from moe_worker.bench.record import Tokens

DONE = "[DONE]"
MAX_COUNT = 2**53


class NotACompletion(ValueError):
    """An event that is no chunk of a completion."""


class StreamFailed(Exception):
    """The server ended the stream with an error; carries its message."""


class StreamedAnswer:
    def __init__(self) -> None:
        self.text_seconds = array("d")
        """When each piece of text came."""
        self.is_done = False
        """The server said that nothing more comes."""
        self.tokens = Tokens(None, None, None)
        self._has_reason = False

    @property
    def is_whole(self) -> bool:
        """Nothing of the text is missing."""
        return self.is_done or self._has_reason

    def take(self, data: str, seconds: float) -> None:
        """The next event, received at `seconds`.

        Raises:
            NotACompletion: what it is, cut short.
            StreamFailed: the server's own message.
        """
        if data.strip() == DONE:
            self.is_done = True
            return
        chunk = _object(data)
        if chunk.get("error"):
            raise StreamFailed(error_message(chunk) or data[:200])
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not all(isinstance(item, dict) for item in choices):
            raise NotACompletion(f"an event without choices: {data[:100]!r}")
        if any(map(_has_text, choices)):
            self.text_seconds.append(seconds)
        self._has_reason |= any(choice.get("finish_reason") for choice in choices)
        if isinstance(chunk.get("usage"), dict):
            self.tokens = _tokens(chunk["usage"])


def error_message(answer: Any) -> str | None:
    """Of an answer in OpenAI's error shape, or one of its relatives."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message[:500] if isinstance(message, str) else None


def _object(data: str) -> dict[str, Any]:
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NotACompletion(f"an event that is no JSON: {data[:100]!r}") from error
    if not isinstance(chunk, dict):
        raise NotACompletion(f"an event that is no object: {data[:100]!r}")
    return chunk


def _has_text(choice: dict[str, Any]) -> bool:
    """Of an answer, of the reasoning before it, or of a tool call."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    parts = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(part) for part in parts)


def _tokens(usage: dict[str, Any]) -> Tokens:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Tokens(
        input=_count(usage.get("prompt_tokens")),
        output=_count(usage.get("completion_tokens")),
        cached=_count(cached),
    )


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None
