"""Bodies are checked at the door: what is wrong is named, what is right means what OpenAI means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_api.worker import ApiLimits
from moe_worker.api.api_error import ApiError
from moe_worker.api.fields import MAX_STOP_CHARACTERS
from moe_worker.api.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)

LIMITS = ApiLimits(max_stop_strings=4, max_choices=8)
HELLO = [{"role": "user", "content": "hi"}]


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, encoded({"model": "m", "messages": HELLO, **fields}), LIMITS)


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, encoded({"model": "m", "prompt": "hi", **fields}), LIMITS)


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def refusal(kind: type[GenerationRequest], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body, LIMITS)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 10**12),
        ("max_tokens", 1e12),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("max_tokens", 1.5),
        ("max_completion_tokens", 0),
        ("temperature", -1),
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0),
        ("top_p", 2),
        ("top_p", float("nan")),
        ("n", 0),
        ("n", 9),
        ("n", 65),
        ("seed", 2**63),
        ("seed", 1.5),
        ("stop", 5),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a", 5]),
        ("stop", ["a"] * 5),
        ("stop", ["a"] * 5000),
        ("stop", "a" * (MAX_STOP_CHARACTERS + 1)),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("messages", []),
        ("messages", "hi"),
        ("messages", None),
        ("messages", [{"role": "user"}]),
        ("messages", [{"role": "robot", "content": "hi"}]),
        ("messages", [{"role": "user", "content": 5}]),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
        ("messages", [{"role": "user", "content": "hi", "name": "me"}]),
        ("messages", [5] * 100_000),
        ("model", 5),
        ("messages", [{"role": "user", "content": "hi", "tool_call_id": "1"}]),
        ("messages", [{"role": "tool", "content": "hi"}]),
        ("messages", [{"role": "assistant"}]),
        ("messages", [{"role": "user", "content": "hi", "tool_calls": [CALL]}]),
        ("messages", [{"role": "assistant", "tool_calls": []}]),
        ("messages", [{"role": "assistant", "tool_calls": [{**CALL, "type": "code"}]}]),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 11),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": "5"}),
        ("logit_bias", {"1": True}),
        ("logit_bias", {str(token): 1 for token in range(2000)}),
        ("logprobs", 1),
        ("top_logprobs", 1),
        ("top_logprobs", 21),
        ("response_format", "json"),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a b"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}),
        ("tools", []),
        ("tools", [{"type": "function"}]),
        ("tools", [tool("a b")]),
        ("tools", [tool("a"), tool("a")]),
        ("tools", [tool(f"f{index}") for index in range(129)]),
        ("tool_choice", "auto"),
        ("tool_choice", "sometimes"),
        ("parallel_tool_calls", True),
        ("ignore_eos", 1),
        ("user", 5),
        ("cache_salt", ""),
        ("cache_salt", "s" * 257),
        ("user", "u" * 513),
        ("best_of", 2),
    ],
)
def test_a_bad_chat_field_is_refused_by_name(field: str, value: Any) -> None:
    body = {"model": "m", "messages": HELLO, field: value}
    error = refusal(ChatRequest, encoded(body))
    assert error.param == field
    assert field in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    "prompt",
    [[1, "a"], [1.0], [True], {}, None, 5, [[["a"]]], ["a", 1], [[1], "a"], [[1], [True]]],
)
def test_a_prompt_is_text_or_ids_or_a_list_of_one_kind(prompt: Any) -> None:
    error = refusal(CompletionRequest, encoded({"model": "m", "prompt": prompt}))
    assert error.param == "prompt"
    assert "a text, a list of token ids, or a list of" in error.message


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2]], [[1, 2]]),
        ([5], [[5]]),
        ("", [""]),
        (["a", "b"], ["a", "b"]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_the_four_spellings_of_a_prompt(prompt: Any, meant: Any) -> None:
    assert completion(prompt=prompt).prompt == meant


def test_prompts_times_answers_are_bounded() -> None:
    assert completion(prompt=["a"] * 4, n=2).num_choices == 8
    for fields in ({"prompt": ["a"] * 9}, {"prompt": ["a"] * 5, "n": 2}, {"prompt": ["a"] * 65}):
        error = refusal(CompletionRequest, encoded({"model": "m", **fields}))
        assert error.param == ("n" if "n" in fields else "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{]",
        b"\xff\xfe",
        b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b"null",
        b"[]",
        b'"text"',
        b'{"model": "m", "n": ' + b"9" * 10_000 + b"}",
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    error = refusal(ChatRequest, body)
    assert len(error.message) < 400


def test_missing_fields_are_named() -> None:
    assert refusal(ChatRequest, b"{}").code == "missing_field"
    assert refusal(CompletionRequest, b'{"model": "m"}').param == "prompt"


def test_an_unknown_field_names_what_is_taken() -> None:
    error = refusal(ChatRequest, encoded({"model": "m", "messages": HELLO, "best_of": 1}))
    assert error.code == "unknown_field"
    assert "max_completion_tokens" in error.message


def test_null_means_absent() -> None:
    fields = set(ChatRequest.model_fields) - {"model", "messages"}
    assert chat(**dict.fromkeys(fields)) == chat()


def test_numbers_and_stops_are_read() -> None:
    request = chat(temperature=1, top_p=1, n=1, stop="x", max_completion_tokens=7, seed=-1)
    assert (request.temperature, request.top_p, request.seed) == (1.0, 1.0, -1)
    assert request.stop == ["x"]
    assert request.asked_tokens == 7


def test_two_limits_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).asked_tokens == 5
    body = {"model": "m", "messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}
    assert refusal(ChatRequest, encoded(body)).param == "max_tokens"


def test_probabilities_are_asked_for_in_two_ways() -> None:
    assert chat().num_logprobs is None
    assert chat(logprobs=False).num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).num_logprobs == 5
    assert completion().num_logprobs is None
    assert completion(logprobs=3).num_logprobs == 3


def test_biases_are_by_number() -> None:
    assert chat(logit_bias={"7": -100, "12": 0.5}).logit_bias == {7: -100.0, 12: 0.5}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [tool("f")], "tool_choice": named("g")}, "tool_choice"),
        ({"tools": [tool("f")], "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: Any, param: str) -> None:
    body = encoded({"model": "m", "messages": HELLO, **fields})
    assert refusal(ChatRequest, body).param == param


def test_tools_and_formats_are_read() -> None:
    request = chat(tools=[tool("f", parameters={"type": "object"})], tool_choice=named("f"))
    assert request.tools is not None
    assert request.tools[0].for_template() == tool("f", parameters={"type": "object"})
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"a": [1]}}}
    assert chat(response_format=wanted).response_format is not None


def test_messages_as_templates_read_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{"}}
    request = chat(
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "assistant", "content": None, "tool_calls": [call, broken], "refusal": None},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]
    )
    system, assistant, answer = [message.for_template() for message in request.messages]
    assert system == {"role": "system", "content": "be brief"}
    assert assistant["content"] == ""
    assert [c["function"]["arguments"] for c in assistant["tool_calls"]] == [{"a": 1}, "{"]
    assert answer == {"role": "tool", "tool_call_id": "1", "content": "2"}


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_usage_in_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
