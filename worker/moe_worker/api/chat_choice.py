"""One choice of a chat answer: what of it goes into chunks, and the message that they add up to."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from moe_worker.api.logprobs import chat_logprobs
from moe_worker.api.pieces import EndReason, Piece
from moe_worker.text.token_texts import TokenTexts
from moe_worker.text.tool_form import CallArguments, CallBegins, Content, Part, ToolCallFinder

FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice:
    """Builds the whole message of the same parts that are streamed, so they can not drift apart."""

    def __init__(self, texts: TokenTexts, finder: ToolCallFinder | None, logprobs: bool) -> None:
        """`finder`: looks for tool calls, where there may be some."""
        self._texts = texts
        self._finder = finder
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._logprobs: dict[str, Any] | None = chat_logprobs((), texts) if logprobs else None

    def opening(self) -> list[dict[str, Any]]:
        """Chunks that begin a stream, before any text is known."""
        return [{"delta": {"role": "assistant", "content": ""}, "logprobs": None}]

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        """The next piece of the answer, as chunks."""
        parts: list[Part] = [Content(piece.text)]
        if self._finder is not None:
            parts = self._finder.push(piece.text)
        return self._chunks(parts, self._told(piece))

    def end(self, reason: EndReason) -> tuple[list[dict[str, Any]], FinishReason]:
        """Last chunks, and how the answer ended."""
        parts = [] if self._finder is None else self._finder.flush()
        chunks = self._chunks(parts, None)
        return chunks, "tool_calls" if self._calls and reason == "stop" else reason

    def whole(self) -> dict[str, Any]:
        """The message of an answer that is not streamed."""
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self._calls:
            message = {"role": "assistant", "content": content or None, "tool_calls": self._calls}
        return {"message": message, "logprobs": self._logprobs}

    def ending(self) -> dict[str, Any]:
        """What the chunk with the finish reason holds."""
        return {"delta": {}, "logprobs": None}

    def _told(self, piece: Piece) -> dict[str, Any] | None:
        if self._logprobs is None:
            return None
        told = chat_logprobs(piece.tokens, self._texts)
        self._logprobs["content"] += told["content"]
        return told

    def _chunks(self, parts: list[Part], told: dict[str, Any] | None) -> list[dict[str, Any]]:
        chunks = [{"delta": self._delta(part), "logprobs": None} for part in parts]
        if told is not None and told["content"]:
            chunks = chunks or [{"delta": {}, "logprobs": None}]
            chunks[0]["logprobs"] = told
        return chunks

    def _delta(self, part: Part) -> dict[str, Any]:
        match part:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case CallBegins(name):
                call = {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
                self._calls.append({**call, "function": {"name": name, "arguments": ""}})
                return {"tool_calls": [{"index": len(self._calls) - 1, **self._newest()}]}
            case CallArguments(text):
                self._newest()["function"]["arguments"] += text
                more = {"index": len(self._calls) - 1, "function": {"arguments": text}}
                return {"tool_calls": [more]}

    def _newest(self) -> dict[str, Any]:
        return self._calls[-1]
