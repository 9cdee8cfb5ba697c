"""From text to token ids, such that only the model's own template can write special tokens.

A user who types `<|end|>` means these seven characters; if they became the token, any user could
end a turn and speak as somebody else. Two clones of the model's tokenizer keep them apart: neither
recognises special tokens in text, and in one each special token has a second, unguessable
spelling. Raw prompts take the same way; a client that wants special tokens in one sends token ids.

Neighbours: `chat` renders messages between `shield` and `encode_rendered`; `prepare` calls both.
"""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from moe_worker.text.detokenizer import Decoder

NORMALIZER_SHRINK = 4
"""How many bytes of text a normaliser may fold into one (composed characters)."""


class TokenizerUnreadable(ValueError):
    """tokenizer.json is missing or is not one."""


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Raises TokenizerUnreadable naming the file."""
    path = model_path / "tokenizer.json"
    if not path.is_file():
        raise TokenizerUnreadable(f"{path} does not exist: the model's folder must hold it")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise TokenizerUnreadable(f"{path} is not a tokenizer: {error}") from error
    if not tokenizer.get_vocab_size(with_added_tokens=False):
        raise TokenizerUnreadable(f"{path} has no vocabulary")
    return tokenizer


class PromptTokenizer:
    """Encodes prompts; safe to use from one thread at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        special = {
            token.content: token_id
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        self.decoder: Decoder = tokenizer
        self._plain = _without_special_tokens(tokenizer)
        self._marking = _without_special_tokens(tokenizer)
        nonce = secrets.token_hex(8)
        self._marks = {text: f"\ue000{nonce}m{i}\ue001" for i, text in enumerate(special)}
        self._shields = {text: f"\ue000{nonce}s{i}\ue001" for i, text in enumerate(special)}
        self._texts = {shield: text for text, shield in self._shields.items()}
        self._id_of_mark = _add_marks(self._marking, tokenizer, special, self._marks)
        self._special = _one_of(special)
        self._special_or_shield = _one_of([*special, *self._texts])
        self._bytes_per_token = _bytes_per_token(tokenizer)

    def is_special(self, text: str) -> bool:
        """A special token's text: it is never part of an answer's text."""
        return text in self._marks

    def fits(self, text: str, num_tokens: int) -> bool:
        """False when `text` is certainly more than `num_tokens` tokens, known without encoding it.

        Encoding is slow (about a second per megabyte), so what can not fit is refused before.
        """
        return len(text.encode()) <= num_tokens * self._bytes_per_token

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt: all of it is text; the tokenizer's own frame (a first token) is added."""
        return self._encode(self._plain, text, add_special_tokens=True)

    def shield(self, text: str) -> str:
        """User text in which nothing spells a special token; `encode_rendered` undoes it."""
        if self._special is None:
            return text
        return self._special.sub(lambda match: self._shields[match[0]], text)

    def encode_rendered(self, rendered: str) -> list[int]:
        """A rendered template with shielded user text: only the template's special tokens count."""
        if self._special_or_shield is not None:
            rendered = self._special_or_shield.sub(self._mark_or_text, rendered)
        ids = self._encode(self._marking, rendered, add_special_tokens=False)
        return [self._id_of_mark.get(token_id, token_id) for token_id in ids]

    def _mark_or_text(self, match: re.Match[str]) -> str:
        return self._marks.get(match[0]) or self._texts[match[0]]

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        # The batch call is the one that lets go of Python's lock, which the engine's thread needs.
        encodings = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids


def _without_special_tokens(tokenizer: Tokenizer) -> Tokenizer:
    clone = Tokenizer.from_str(tokenizer.to_str())
    clone.encode_special_tokens = True  # the library's name for: encode them as ordinary text
    clone.no_truncation()
    clone.no_padding()
    return clone


def _add_marks(
    clone: Tokenizer, tokenizer: Tokenizer, special: dict[str, int], marks: dict[str, str]
) -> dict[int, int]:
    """Give each special token a second spelling in `clone`; returns its new id → its real id."""
    real = tokenizer.get_added_tokens_decoder()
    clone.add_tokens(
        [
            AddedToken(
                marks[text],
                lstrip=real[token_id].lstrip,
                rstrip=real[token_id].rstrip,
                normalized=False,
                special=False,
            )
            for text, token_id in special.items()
        ]
    )
    added = clone.get_added_tokens_decoder()
    text_of_mark = {mark: text for text, mark in marks.items()}
    return {
        mark_id: special[text_of_mark[token.content]]
        for mark_id, token in added.items()
        if token.content in text_of_mark
    }


def _one_of(texts: dict[str, int] | list[str]) -> re.Pattern[str] | None:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _bytes_per_token(tokenizer: Tokenizer) -> int:
    """Upper bound of the bytes of text that one token can stand for."""
    longest = max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=False))
    return longest * (1 if tokenizer.normalizer is None else NORMALIZER_SHRINK)
