"""Which form a chat answer must have: what its response format and its tools come to.

Neighbours: `prepare` asks, `text.grammar` and `text.tool_form` write the grammars.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moe_worker.api.api_error import ApiError, invalid
from moe_worker.api.formats import JsonObjectFormat, JsonSchemaFormat, NamedTool, Tool
from moe_worker.api.openai import ChatRequest
from moe_worker.api.served_model import ServedModel
from moe_worker.text import tool_form
from moe_worker.text.grammar import CompiledGrammar, GrammarRefused, Grammars, json_rule
from moe_worker.text.tool_form import Callable, calls_grammar

MAX_TOOLS_BYTES = 256 * 1024
"""All tools of a request as JSON: the model reads them as part of its prompt."""
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class AnswerForm:
    grammar: CompiledGrammar | None = None
    tools: Sequence[Tool] | None = None
    """Shown to the model; None also when it must not call any."""


def answer_form(request: ChatRequest, model: ServedModel) -> AnswerForm:
    """The form that an answer to `request` must have.

    Raises:
        ApiError: 400 naming the field that can not be followed.
    """
    tools = None if request.tool_choice == "none" else request.tools
    if tools is not None:
        return _with_tools(request, tools, model)
    schema = _schema(request)
    if schema is None:
        return AnswerForm()
    try:
        return AnswerForm(_grammars(model, "response_format").json(*schema))
    except GrammarRefused as error:
        raise _not_supported("response_format", error) from error


def _with_tools(request: ChatRequest, tools: Sequence[Tool], model: ServedModel) -> AnswerForm:
    choice = request.tool_choice or "auto"
    grammars = _grammars(model, "tools")
    _check_template(model, choice != "auto")
    size = len(json.dumps([tool.for_template() for tool in tools]))
    if size > MAX_TOOLS_BYTES:
        raise invalid(f"tools: {size} bytes are more than {MAX_TOOLS_BYTES}", param="tools")
    named = choice.function.name if isinstance(choice, NamedTool) else None
    schema = _schema(request)
    try:
        grammar = calls_grammar(
            [_callable(tool) for tool in tools if named in (None, tool.function.name)],
            forced=choice != "auto",
            parallel=request.parallel_tool_calls is not False and named is None,
            answer=None if schema is None else json_rule(*schema),
        )
        return AnswerForm(grammars.lark(grammar), tools)
    except GrammarRefused as error:
        raise _not_supported("tools", error) from error


def _check_template(model: ServedModel, forced: bool) -> None:
    template = model.template
    assert template is not None, "chat needs one"
    if not template.knows_tools:
        message = f"tools: the chat template of {model.name!r} does not know tools"
        raise invalid(message, param="tools", code="tools_not_supported")
    told = tool_form.BEGIN in template.source and not model.tokenizer.is_special(tool_form.BEGIN)
    if not forced and not told:
        raise invalid(
            f"tool_choice: calls of {model.name!r} can not be told from its text; "
            "use required, a named tool or none",
            param="tool_choice",
            code="tools_not_supported",
        )


def _schema(request: ChatRequest) -> tuple[dict[str, Any], bool] | None:
    """JSON schema of the answer, and whether what can not be guided in it is let be."""
    match request.response_format:
        case JsonObjectFormat():
            return ANY_OBJECT, False
        case JsonSchemaFormat(json_schema=wanted):
            schema = ANY_OBJECT if wanted.schema_ is None else wanted.schema_
            return schema, not wanted.strict
        case _:
            return None


def _callable(tool: Tool) -> Callable:
    function = tool.function
    parameters = NO_ARGUMENTS if function.parameters is None else function.parameters
    return Callable(function.name, parameters, lenient=not function.strict)


def _grammars(model: ServedModel, param: str) -> Grammars:
    if model.grammars is None:
        message = f"{param}: the tokens of {model.name!r} can not be guided"
        raise invalid(message, param=param, code="not_supported")
    return model.grammars


def _not_supported(param: str, error: GrammarRefused) -> ApiError:
    return invalid(f"{param}: {error}", param=param, code="schema_not_supported")
