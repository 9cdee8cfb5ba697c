"""What surrounds the choices of an answer: ids, usage, and how it is put on the wire."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Tokens of the prompts that were found in the prefix cache."""

    def to_wire(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True)
class Kind:
    """`object` of a route's answers."""

    whole: str
    chunk: str


CHAT = Kind("chat.completion", "chat.completion.chunk")
TEXT = Kind("text_completion", "text_completion")


@dataclass(frozen=True)
class Envelope:
    """What all answers to one request carry. `reports_usage`: then every chunk has the field."""

    kind: Kind
    request_id: str
    created: int
    model: str
    reports_usage: bool

    def chunk(self, index: int, part: dict[str, Any], reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **part, "finish_reason": reason}
        usage = {"usage": None} if self.reports_usage else {}
        return self._wrap(self.kind.chunk, choices=[choice], **usage)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """Chunk after the last one, only for clients that asked."""
        return self._wrap(self.kind.chunk, choices=[], usage=usage.to_wire())

    def whole(
        self, choices: Sequence[dict[str, Any]], reasons: Sequence[str], usage: Usage
    ) -> dict[str, Any]:
        listed = [
            {"index": index, **choice, "finish_reason": reason}
            for index, (choice, reason) in enumerate(zip(choices, reasons, strict=True))
        ]
        return self._wrap(self.kind.whole, choices=listed, usage=usage.to_wire())

    def _wrap(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            **fields,
        }


def to_json(answer: dict[str, Any]) -> bytes:
    """Strict JSON: a number that JSON can not hold is a bug here, not at the client."""
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def to_event(answer: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(answer) + b"\n\n"
