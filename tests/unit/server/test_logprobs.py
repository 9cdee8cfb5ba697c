"""Probabilities in OpenAI's two shapes: strict JSON, whole bytes, the chosen token among them."""

from __future__ import annotations

import json
import math
from typing import Any

from moe_worker.api.logprobs import FLOOR, chat_logprobs, text_logprobs
from moe_worker.api.pieces import TextToken
from moe_worker.engine.events import TokenLogprobs
from moe_worker.text.grammar import Grammars
from moe_worker.text.token_texts import DecodedTexts, shown
from tests.support.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXTS = Grammars(TOKENIZER, TOKENIZER.get_vocab_size(), frozenset({TOKENIZER.token_to_id(END)}))
TOKENS = (
    TextToken(97, 0, TokenLogprobs(97, -0.5, ((98, -0.2), (97, -0.5)))),
    TextToken(0xF0, 1, TokenLogprobs(0xF0, -1.0, ((97, 0.0), (98, -math.inf)))),
)


def strict(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_e02_chat_probabilities_are_finite_and_hold_bytes() -> None:
    first, second = strict(chat_logprobs(TOKENS, TEXTS))["content"]
    assert first == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "b", "logprob": -0.2, "bytes": [98]},
            {"token": "a", "logprob": -0.5, "bytes": [97]},
        ],
    }
    assert (second["token"], second["bytes"]) == ("bytes:\\xf0", [0xF0])
    assert second["top_logprobs"][1]["logprob"] == FLOOR


def test_e02_text_probabilities_are_finite_and_name_the_chosen_token() -> None:
    told = strict(text_logprobs((TextToken(98, 0, None), *TOKENS), TEXTS))
    assert told == {
        "tokens": ["b", "a", "bytes:\\xf0"],
        "token_logprobs": [None, -0.5, -1.0],
        "top_logprobs": [None, {"b": -0.2, "a": -0.5}, {"a": 0, "b": FLOOR, "bytes:\\xf0": -1.0}],
        "text_offset": [0, 0, 1],
    }


def test_nothing_to_tell() -> None:
    assert chat_logprobs((), TEXTS) == {"content": [], "refusal": None}


def test_without_known_bytes_a_token_is_decoded_alone() -> None:
    texts = DecodedTexts(TOKENIZER)
    assert texts.token_bytes(97) == b"a"
    assert shown(texts.token_bytes(TOKENIZER.token_to_id(END))) == END
