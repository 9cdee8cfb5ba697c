"""Turns tokens into text as they come, without ever sending half a character.

A character may be spread over several tokens, and a token's text may depend on its neighbours, so
tokens are decoded together with the ones before them and the text that has grown is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CONTEXT_TOKENS = 8
"""How far back a token's text may depend on others."""
REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, or not yet one."""


class Decoder(Protocol):
    """The part of `tokenizers.Tokenizer` that is needed here."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """The text of one growing list of tokens.

    For byte-level tokenizers all pieces joined, `flush` included, are exactly the decoded text of
    all tokens. Text that ends in U+FFFD waits for the next token, because the rest of the character
    may be there; `flush` gives out what never came true as the U+FFFD that decoding gives.
    """

    def __init__(self, decoder: Decoder, before: Sequence[int] = ()) -> None:
        """`before`: tokens that this text goes on from, if it does; theirs is not given out."""
        self._decoder = decoder
        self._context: list[int] = list(before[-CONTEXT_TOKENS:])
        """Tokens already given out whose text the next ones may depend on."""
        self._context_text = self._decode(self._context)
        if self._context_text.endswith(REPLACEMENT):
            self._context, self._context_text = [], ""
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that this token completes, often "" in the middle of a character."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        if text.endswith(REPLACEMENT):
            return ""
        return self._give_out(text)

    def flush(self) -> str:
        """The rest, once no more tokens will come; U+FFFD for a character left incomplete."""
        return self._give_out(self._decode(self._context + self._pending))

    def _give_out(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        pending_text = self._decode(self._pending)
        if pending_text:  # else they are special tokens, which give the next ones no context
            self._context, self._context_text = self._pending, pending_text
        self._pending = []
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=True)
