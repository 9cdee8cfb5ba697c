"""Guided answers follow their schema; what can not be guided is refused in time and by name."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from moe_worker.engine.sampling_params import GrammarFailed
from moe_worker.text.grammar import (
    MAX_GRAMMAR_BYTES,
    FollowedGrammar,
    GrammarRefused,
    Grammars,
    TokenizerUnguidable,
)
from tests.support.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
END_ID = TOKENIZER.token_to_id(END)
CLOSING = set(b'"}]')
PADDED_VOCABULARY = TOKENIZER.get_vocab_size() + 9
GRAMMARS = Grammars(TOKENIZER, PADDED_VOCABULARY, frozenset({END_ID}))
SCHEMAS: list[dict[str, Any]] = [
    {"type": "object"},
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "ü", "😀"]}, "maxItems": 3},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/leaf"}]},
        },
        "required": ["name", "age", "next"],
        "additionalProperties": False,
        "$defs": {"leaf": {"type": "boolean"}},
    },
    {"const": {"a": [1, 2.5, "x"]}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
]


def an_answer(grammar: FollowedGrammar, seed: int, most: int = 3000) -> str:
    """Tokens at random among the allowed ones; ends as soon as it may."""
    draw, output = random.Random(seed), []
    for _ in range(most):
        allowed = np.flatnonzero(grammar.allowed(output)).tolist()
        if END_ID in allowed:
            text: str = TOKENIZER.decode(output)
            return text
        quotes = [token for token in allowed if token in CLOSING]
        output.append(draw.choice(quotes if quotes and draw.random() < 0.5 else allowed))
    raise AssertionError("no end")


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_allowed_answer_is_right_by_the_schema(schema: dict[str, Any], seed: int) -> None:
    text = an_answer(GRAMMARS.json(schema, lenient=False).begin(), seed)
    jsonschema_rs.validate(schema, json.loads(text))


def test_a_mask_is_a_function_of_the_tokens_so_far() -> None:
    compiled = GRAMMARS.json({"const": "the"}, lenient=False)
    ids = TOKENIZER.encode('"the"').ids
    stepwise, at_once = compiled.begin(), compiled.begin()
    for length in range(len(ids) + 1):
        mask = stepwise.allowed(ids[:length])
        assert mask.shape == (PADDED_VOCABULARY,)
        assert np.array_equal(mask, stepwise.allowed(ids[:length])), "asked again after a fault"
    assert np.array_equal(at_once.allowed(ids), mask)
    assert np.flatnonzero(mask).tolist() == [END_ID]


def test_tokens_that_the_tokenizer_lacks_are_never_allowed() -> None:
    mask = GRAMMARS.lark("start: /(.|\\n)*/").begin().allowed([])
    assert not mask[TOKENIZER.get_vocab_size() :].any()
    assert mask[:256].sum() > 100


def test_a_token_that_is_not_allowed_ends_the_following() -> None:
    grammar = GRAMMARS.json({"const": 1}, lenient=False).begin()
    with pytest.raises(GrammarFailed, match="can not be followed"):
        grammar.allowed(TOKENIZER.encode("2").ids)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objct"}, "Invalid type: objct"),
        ({"type": "string", "format": "weird"}, "weird"),
        ({"minimum": float("nan")}, "not JSON"),
        ({"description": "x" * MAX_GRAMMAR_BYTES}, "larger than"),
        ({"enum": list(range(20_000))}, "20002 values"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "1001 properties"),
        ({"anyOf": [{"properties": {f"p{i}": {}}} for i in range(1001)]}, "1001 properties"),
        ({"$ref": "#/$defs/nowhere"}, "nowhere"),
        ({"type": "string", "pattern": "["}, "regex"),
    ],
)
def test_a_schema_that_can_not_be_guided_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarRefused, match=reason) as caught:
        GRAMMARS.json(schema, lenient=False)
    assert len(str(caught.value)) < 300


def test_as_many_properties_as_are_allowed_can_be_followed() -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1000)}}
    grammar = GRAMMARS.json(schema, lenient=False).begin()
    ids = TOKENIZER.encode('{"p1": null, "p999": null').ids
    for length in range(len(ids)):
        assert grammar.allowed(ids[:length])[ids[length]]


def test_leniently_unknown_keywords_are_let_be() -> None:
    schema = {"type": "string", "format": "weird"}
    assert an_answer(GRAMMARS.json(schema, lenient=True).begin(), 1).startswith('"')


def test_blank_space_has_an_end() -> None:
    grammar = GRAMMARS.json({"type": "object"}, lenient=False).begin()
    output = TOKENIZER.encode("{").ids
    space = TOKENIZER.encode(" ").ids
    for _ in range(40):
        assert grammar.allowed(output)[space[0]]
        output += space
    assert not grammar.allowed(output)[space[0]]


def test_without_an_end_token_nothing_is_guided() -> None:
    endless = Grammars(TOKENIZER, PADDED_VOCABULARY, frozenset())
    with pytest.raises(GrammarRefused, match="no token that ends"):
        endless.json({"type": "object"}, lenient=False)


def test_a_tokenizer_whose_bytes_are_unknown_is_told() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(TokenizerUnguidable, match="no guided decoding"):
        Grammars(words, 2, frozenset({1}))


def test_bytes_of_tokens() -> None:
    assert GRAMMARS.token_bytes(TOKENIZER.encode("the").ids[0]) == b"the"
    assert GRAMMARS.token_bytes(0xF0) == b"\xf0"
