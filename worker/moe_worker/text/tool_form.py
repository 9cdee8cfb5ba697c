"""How a model writes tool calls in its text, and how they are found there again.

One form is known, that of Hermes and Qwen: `<tool_call>`, a line of JSON with name and arguments,
`</tool_call>`. A grammar makes the model keep to it exactly, once it begins a call, so finding the
calls is a search for fixed texts. Neighbours: `grammar` compiles, `api.chat_choice` sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_worker.text.grammar import check_size, json_rule

BEGIN = "<tool_call>"
NAME = '\n{"name": "'
ARGUMENTS = '", "arguments": '
END = "}\n</tool_call>"
ANY_TEXT = "/(.|\\n)*/"
MAX_CALLS = 64
"""In one answer."""


@dataclass(frozen=True)
class Callable:
    """What the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments."""
    lenient: bool
    """What of the schema can not be guided is let be."""


def calls_grammar(
    tools: Sequence[Callable], *, forced: bool, parallel: bool, answer: str | None
) -> str:
    """Lark grammar of an answer with calls of `tools`.

    Args:
        forced: the answer is calls and nothing else.
        parallel: more than one call is allowed.
        answer: rule of an answer without calls, None = any text. Not with `forced`.

    Raises:
        GrammarRefused: a schema is not JSON, or they are too large together.
    """
    check_size([tool.parameters for tool in tools])
    functions = " | ".join(f"function_{index}" for index in range(len(tools)))
    rules = [f"call: {_literal(NAME)} ({functions}) {_literal(END)}"]
    for index, tool in enumerate(tools):
        schema = json_rule(dict(tool.parameters), tool.lenient)
        rules.append(f"function_{index}: {_literal(tool.name + ARGUMENTS)} {schema}")
    more = f"({_literal(chr(10) + BEGIN)} call){{0,{MAX_CALLS - 1}}}" if parallel else ""
    calls = f"calls: {_literal(BEGIN)} call {more}"
    if forced:
        rules += ["start: calls", calls]
    elif answer is not None:
        rules += ["start: calls | answer", calls, f"answer: {answer}"]
    else:
        # The lazy lexeme ends as soon as a call begins: from there on the call's form is kept.
        rules += [
            f"start: called{{0,{MAX_CALLS}}} TEXT" if parallel else "start: TEXT | called",
            "called: until_call call",
            f"until_call[lazy]: TEXT {_literal(BEGIN)}",
            f"TEXT: {ANY_TEXT}",
        ]
    return "\n".join(["%llguidance {}", *rules])


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the newest call's arguments."""

    text: str


Part = Content | CallBegins | CallArguments


class ToolCallFinder:
    """Splits a guided answer, which arrives in pieces, into text and calls.

    Blank text around calls belongs to the form, not to the answer.
    """

    def __init__(self) -> None:
        self._held = ""
        self._sought = BEGIN
        self.num_calls = 0

    def push(self, piece: str) -> list[Part]:
        """Parts that are certain now."""
        self._held += piece
        parts: list[Part] = []
        while (place := self._held.find(self._sought)) >= 0:
            before = self._held[:place]
            self._held = self._held[place + len(self._sought) :]
            parts += self._found(before)
        parts += self._certain()
        return [part for part in parts if part != Content("") and part != CallArguments("")]

    def flush(self) -> list[Part]:
        """The rest, once no more comes. A call that was cut before its arguments is no call."""
        held, self._held = self._held, ""
        if self._sought == BEGIN and not (self.num_calls and not held.strip()):
            return [Content(held)] if held else []
        return [CallArguments(held)] if self._sought == END and held else []

    def _found(self, before: str) -> list[Part]:
        """What was looked for is there, `before` precedes it."""
        if self._sought == BEGIN:
            self._sought = ARGUMENTS
            return [Content(before.rstrip())]
        if self._sought == ARGUMENTS:
            self._sought = END
            self.num_calls += 1
            return [CallBegins(before.removeprefix(NAME))]
        self._sought = BEGIN
        return [CallArguments(before)]

    def _certain(self) -> list[Part]:
        """Held text that can not be part of what is looked for."""
        if self._sought == ARGUMENTS:
            return []
        keep = _overlap(self._held, self._sought)
        certain = self._held[: len(self._held) - keep]
        if self._sought == BEGIN:
            certain = certain.rstrip()
        self._held = self._held[len(certain) :]
        return [Content(certain) if self._sought == BEGIN else CallArguments(certain)]


def _overlap(text: str, sought: str) -> int:
    """Length of the longest end of `text` that `sought` begins with."""
    for length in range(min(len(text), len(sought) - 1), 0, -1):
        if sought.startswith(text[-length:]):
            return length
    return 0


def _literal(text: str) -> str:
    return json.dumps(text)
