"""Single tokens as clients see them beside their probabilities: bytes, and a text for people."""

from __future__ import annotations

from typing import Protocol

from moe_worker.text.detokenizer import Decoder


class TokenTexts(Protocol):
    def token_bytes(self, token_id: int) -> bytes: ...


class DecodedTexts:
    """Of a tokenizer whose bytes are not known: each token decoded alone."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def token_bytes(self, token_id: int) -> bytes:
        return self._decoder.decode([token_id], skip_special_tokens=False).encode()


def shown(token: bytes) -> str:
    """The token's text; of a part of a character OpenAI's spelling of its bytes."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
