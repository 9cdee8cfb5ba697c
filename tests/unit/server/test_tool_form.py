"""Tool calls in a text: found whatever the pieces it comes in, and guided to one form."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.text.grammar import FollowedGrammar, Grammars
from moe_worker.text.tool_form import (
    Callable,
    CallArguments,
    CallBegins,
    Content,
    Part,
    ToolCallFinder,
    calls_grammar,
)
from tests.support.byte_tokenizer import END, byte_tokenizer

TOKENIZER = byte_tokenizer()
END_ID = TOKENIZER.token_to_id(END)
GRAMMARS = Grammars(TOKENIZER, TOKENIZER.get_vocab_size(), frozenset({END_ID}))
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [Callable("weather", CITY, lenient=False), Callable("now", {"type": "object"}, True)]


def written(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def joined(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and calls with their arguments."""
    content, calls = "", []
    for part in parts:
        match part:
            case Content(text):
                content += text
            case CallBegins(name):
                calls.append((name, ""))
            case CallArguments(text):
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
    return content, calls


def found(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    finder = ToolCallFinder()
    parts = [part for piece in pieces for part in finder.push(piece)]
    return joined(parts + finder.flush())


ARGUMENTS = st.dictionaries(st.text(max_size=5), st.text("a<>/\n}{\"'\\ _", max_size=8), max_size=2)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_it"]), ARGUMENTS), max_size=3)


@given(st.text("ab <>_/tol\n", max_size=12), CALLS, st.lists(st.integers(0, 200), max_size=12))
def test_calls_are_found_however_the_text_is_cut(
    content: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    wanted = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = content + "\n".join(written(name, arguments) for name, arguments in wanted)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(places)]
    got_content, got_calls = found(*pieces)
    assert got_calls == wanted
    assert got_content == (content.rstrip() if calls else content)


def test_a_call_streams_as_it_comes() -> None:
    finder = ToolCallFinder()
    assert finder.push("Let me see. <tool") == [Content("Let me see.")]
    assert finder.push('_call>\n{"name": "f", "argu') == []
    assert finder.push('ments": {"a"') == [CallBegins("f"), CallArguments('{"a"')]
    assert finder.push(": 1}}") == [CallArguments(": 1}")]
    assert finder.push("\n</tool_call>") == []
    assert finder.flush() == []


def test_text_that_only_begins_like_a_call_is_text() -> None:
    assert found("a <tool", "box> b ") == ("a <toolbox> b ", [])


def test_a_call_that_the_limit_cut() -> None:
    assert found('<tool_call>\n{"name": "f') == ("", [])
    assert found('<tool_call>\n{"name": "f", "arguments": {"a": "b') == ("", [("f", '{"a": "b')])


def following(grammar: FollowedGrammar, text: str) -> bool:
    """Does the grammar take the text, token by token, and allow it to end there?"""
    output: list[int] = []
    for token in TOKENIZER.encode(text).ids:
        if not grammar.allowed(output)[token]:
            return False
        output.append(token)
    return bool(grammar.allowed(output)[END_ID])


RIGHT = written("weather", '{"city": "Bern"}')
OTHER = written("now", "{}")


@pytest.mark.parametrize(
    ("text", "forced", "parallel", "allowed"),
    [
        (RIGHT, True, True, True),
        (f"{RIGHT}\n{OTHER}", True, True, True),
        (f"{RIGHT}\n{OTHER}", True, False, False),
        (f"Hello {RIGHT}", True, True, False),
        ("", True, True, False),
        (RIGHT[:-3], True, True, False),
        (written("unknown", "{}"), True, True, False),
        (written("weather", "{}"), True, True, False),
        (written("weather", '{"city": 5}'), True, True, False),
        ("Hello 😀", False, True, True),
        (f"Hello {RIGHT}", False, True, True),
        (f"{RIGHT}\n{OTHER}", False, True, True),
        (RIGHT, False, False, True),
        (f"{RIGHT}\n{OTHER}", False, False, False),
        ("a <tool_call> is", False, True, False),
        (written("weather", "{}"), False, True, False),
    ],
)
def test_which_answers_with_tools_are_allowed(
    text: str, forced: bool, parallel: bool, allowed: bool
) -> None:
    source = calls_grammar(TOOLS, forced=forced, parallel=parallel, answer=None)
    assert following(GRAMMARS.lark(source).begin(), text) is allowed


@pytest.mark.parametrize(("text", "allowed"), [("7", True), (RIGHT, True), ("Hello", False)])
def test_calls_beside_an_answer_of_a_given_form(text: str, allowed: bool) -> None:
    answer = '%json {"type": "integer"}'
    source = calls_grammar(TOOLS, forced=False, parallel=True, answer=answer)
    assert following(GRAMMARS.lark(source).begin(), text) is allowed
