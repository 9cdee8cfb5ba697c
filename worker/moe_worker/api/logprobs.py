"""Probabilities of tokens in the two shapes that OpenAI's routes have for them.

JSON has no infinity: what is impossible gets the floor that OpenAI uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_worker.api.pieces import TextToken
from moe_worker.text.token_texts import TokenTexts, shown

FLOOR = -9999.0


def chat_logprobs(tokens: Sequence[TextToken], texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a chat answer."""
    content = []
    for token in tokens:
        assert token.logprobs is not None, "an answer's tokens follow something"
        entry = _entry(token.token_id, token.logprobs.logprob, texts)
        top = [_entry(other, value, texts) for other, value in token.logprobs.alternatives]
        content.append({**entry, "top_logprobs": top})
    return {"content": content, "refusal": None}


def text_logprobs(tokens: Sequence[TextToken], texts: TokenTexts) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; the chosen token is among the alternatives."""
    return {
        "tokens": [shown(texts.token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [
            None if token.logprobs is None else finite(token.logprobs.logprob) for token in tokens
        ],
        "top_logprobs": [_alternatives(token, texts) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def _entry(token_id: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    token = texts.token_bytes(token_id)
    return {"token": shown(token), "logprob": finite(logprob), "bytes": list(token)}


def _alternatives(token: TextToken, texts: TokenTexts) -> dict[str, float] | None:
    if token.logprobs is None:
        return None
    found: dict[str, float] = {}
    for other, logprob in (*token.logprobs.alternatives, (token.token_id, token.logprobs.logprob)):
        # Two tokens may have the same text: the more probable one stands for it.
        found.setdefault(shown(texts.token_bytes(other)), finite(logprob))
    return found
