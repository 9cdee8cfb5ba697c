"""Guided decoding: what may come next, so that an answer follows a JSON schema or a tool's form.

`llguidance` does the parsing; here is what of it the engine needs: a mask of allowed tokens as a
function of the tokens so far. Why this library: docs/decisions/0015-guided-decoding.md.
Neighbours: `tool_form` writes the grammars of tool calls, `api.prepare` asks for them, the engine's
`sampler` applies the masks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from moe_worker.engine.sampling_params import GrammarFailed

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_PROPERTIES = 1000
"""Compiling takes a second for a thousand properties of an object, and a minute for five times as
many."""
MAX_VALUES = 10_000
"""All of a schema's keywords, list items, … together. All bounds are for a request."""
MAX_ERROR_CHARACTERS = 200
JSON_WHITESPACE = r"[ \n\t]{0,40}"
"""Enough for an indented text, too little for an endless one."""
LIMITS = LLParserLimits(
    max_items_in_row=5 * MAX_PROPERTIES,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=200_000,
    verbose_errors=False,
)
"""A step takes milliseconds, at the limits some tens of them; beyond it is an error."""


class GrammarRefused(ValueError):
    """The schema is not one, asks for something that can not be guided, or is too large."""


class TokenizerUnguidable(ValueError):
    """This tokenizer's tokens can not be read as bytes."""


class Grammars:
    """Compiles grammars for one model's tokens."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, stop_token_ids: frozenset[int]
    ) -> None:
        """Raises TokenizerUnguidable."""
        self.vocab_size = vocab_size
        known = tokenizer.get_vocab_size(with_added_tokens=True)
        ends = sorted(token for token in stop_token_ids if token < known)
        self.can_end = bool(ends)
        try:
            self._tokens = LLTokenizer(tokenizer.to_str(), max(known, vocab_size), ends or [0])
        except ValueError as error:
            raise TokenizerUnguidable(f"no guided decoding: {_short(str(error))}") from error

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens.decode_bytes([token_id])

    def json(self, schema: dict[str, Any], lenient: bool) -> CompiledGrammar:
        """JSON that follows `schema`; `lenient`: what can not be guided in it is let be.

        Raises:
            GrammarRefused: with the reason.
        """
        check_size([schema])
        return self.lark(f"start: {json_rule(schema, lenient)}")

    def lark(self, grammar: str) -> CompiledGrammar:
        """A grammar in llguidance's dialect of Lark. Raises GrammarRefused."""
        if not self.can_end:
            raise GrammarRefused("this model has no token that ends an answer")
        if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
            raise GrammarRefused(f"the schemas are larger than {MAX_GRAMMAR_BYTES} bytes together")
        matcher = LLMatcher(
            self._tokens, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=LIMITS
        )
        if matcher.is_error():
            raise GrammarRefused(_short(matcher.get_error()))
        return CompiledGrammar(matcher, self.vocab_size)


class CompiledGrammar:
    """One grammar, for any number of sequences."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def begin(self) -> FollowedGrammar:
        """For one sequence."""
        return FollowedGrammar(self._matcher.deep_copy(), self._vocab_size)


class FollowedGrammar:
    """The engine's `Grammar`: goes along with one sequence."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._num_followed = 0

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_]:
        """See `engine.sampling_params.Grammar`."""
        new = output[self._num_followed :]
        if new and not self._matcher.consume_tokens(list(new)):
            raise GrammarFailed(self._reason())
        self._num_followed = len(output)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GrammarFailed(self._reason())
        allowed = np.unpackbits(bits, bitorder="little")[: self._vocab_size]
        return allowed.view(np.bool_)

    def _reason(self) -> str:
        return f"the answer's format can not be followed on: {_short(self._matcher.get_error())}"


def check_size(schemas: Sequence[Mapping[str, Any]]) -> None:
    """Raises GrammarRefused: the schemas of a request together would take too long to compile."""
    num_properties = num_values = 0
    rest: list[Any] = list(schemas)
    while rest:
        value = rest.pop()
        num_values += 1
        if isinstance(value, Mapping):
            properties = value.get("properties")
            num_properties += len(properties) if isinstance(properties, Mapping) else 0
            rest += value.values()
        elif isinstance(value, list):
            rest += value
    if num_properties > MAX_PROPERTIES:
        raise GrammarRefused(f"{num_properties} properties are more than {MAX_PROPERTIES}")
    if num_values > MAX_VALUES:
        raise GrammarRefused(f"{num_values} values in schemas are more than {MAX_VALUES}")


def json_rule(schema: dict[str, Any], lenient: bool) -> str:
    """The part of a Lark grammar that means JSON by `schema`. Raises GrammarRefused."""
    options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient}
    try:
        return f"%json {json.dumps({**schema, 'x-guidance': options}, allow_nan=False)}"
    except ValueError as error:
        raise GrammarRefused(f"the schema is not JSON: {error}") from error


def _short(message: str) -> str:
    first = message.strip().splitlines()[0] if message.strip() else "unknown cause"
    return first[:MAX_ERROR_CHARACTERS]
