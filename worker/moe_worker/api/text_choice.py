"""One choice of a text completion: chunks, and the text that they add up to."""

from __future__ import annotations

from typing import Any

from moe_worker.api.logprobs import text_logprobs
from moe_worker.api.pieces import EndReason, Piece, TextToken
from moe_worker.text.token_texts import TokenTexts


class TextChoice:
    """Neighbour of `chat_choice`, with the same methods."""

    def __init__(self, texts: TokenTexts, logprobs: bool) -> None:
        self._texts = texts
        self._tells = logprobs
        self._text: list[str] = []
        self._tokens: list[TextToken] = []

    def opening(self) -> list[dict[str, Any]]:
        return []

    def take(self, piece: Piece) -> list[dict[str, Any]]:
        self._text.append(piece.text)
        self._tokens += piece.tokens
        return [{"text": piece.text, "logprobs": self._told(piece.tokens)}]

    def end(self, reason: EndReason) -> tuple[list[dict[str, Any]], EndReason]:
        return [], reason

    def whole(self) -> dict[str, Any]:
        return {"text": "".join(self._text), "logprobs": self._told(self._tokens)}

    def ending(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _told(self, tokens: list[TextToken] | tuple[TextToken, ...]) -> dict[str, Any] | None:
        return text_logprobs(tokens, self._texts) if self._tells else None
