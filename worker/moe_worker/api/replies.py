"""What the public API writes: chunks and whole answers of completions and chat completions.

Plain dicts, built in one place per route, so that a stream and a whole answer cannot drift apart.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from moe_worker.api.pieces import EndReason

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def to_wire(self) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


class Reply(Protocol):
    """The shape of one route's answers."""

    def opening(self) -> dict[str, Any] | None:
        """Chunk that begins a stream, before any text is known."""

    def piece(self, text: str) -> dict[str, Any]: ...

    def ending(self, reason: EndReason) -> dict[str, Any]: ...

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Chunk after the ending, only for clients that asked."""

    def whole(self, text: str, reason: EndReason, usage: Usage) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Envelope:
    """What all answers to one request carry. `reports_usage`: then every chunk has the field."""

    request_id: str
    created: int
    model: str
    reports_usage: bool

    def wrap(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            **fields,
        }

    def chunk(self, kind: str, **choice: Any) -> dict[str, Any]:
        usage = {"usage": None} if self.reports_usage else {}
        return self.wrap(kind, choices=[{"index": 0, "logprobs": None, **choice}], **usage)


@dataclass(frozen=True)
class ChatReply(_Envelope):
    """`chat.completion`."""

    def opening(self) -> dict[str, Any]:
        return self._delta({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> dict[str, Any]:
        return self._delta({"content": text}, None)

    def ending(self, reason: EndReason) -> dict[str, Any]:
        return self._delta({}, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self.wrap("chat.completion.chunk", choices=[], usage=usage.to_wire())

    def whole(self, text: str, reason: EndReason, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return self.wrap("chat.completion", choices=[choice], usage=usage.to_wire())

    def _delta(self, delta: dict[str, Any], reason: EndReason | None) -> dict[str, Any]:
        return self.chunk("chat.completion.chunk", delta=delta, finish_reason=reason)


@dataclass(frozen=True)
class TextReply(_Envelope):
    """`text_completion`, the same name for chunks and whole answers."""

    def opening(self) -> None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return self.chunk("text_completion", text=text, finish_reason=None)

    def ending(self, reason: EndReason) -> dict[str, Any]:
        return self.chunk("text_completion", text="", finish_reason=reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        return self.wrap("text_completion", choices=[], usage=usage.to_wire())

    def whole(self, text: str, reason: EndReason, usage: Usage) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return self.wrap("text_completion", choices=[choice], usage=usage.to_wire())


def to_json(answer: dict[str, Any]) -> bytes:
    """Strict JSON: a number that JSON can not hold is a bug here, not at the client."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def to_event(answer: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(answer) + b"\n\n"
