"""Bodies are checked at the door: what is wrong is named, what is right means what OpenAI means."""

from __future__ import annotations

import json
from typing import Any

import pytest

from moe_worker.api.api_error import ApiError
from moe_worker.api.openai import (
    MAX_STOP_CHARACTERS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, encoded({"model": "m", "messages": HELLO, **fields}), 4)


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, encoded({"model": "m", "prompt": "hi", **fields}), 4)


def encoded(body: object) -> bytes:
    return json.dumps(body).encode()


def refusal(kind: type[GenerationRequest], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(kind, body, 4)
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
        ("n", 2),
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
        ("logit_bias", {"99999999": 1}),
        ("logprobs", True),
        ("tools", []),
        ("user", "me"),
    ],
)
def test_a_bad_chat_field_is_refused_by_name(field: str, value: Any) -> None:
    body = {"model": "m", "messages": HELLO, field: value}
    error = refusal(ChatRequest, encoded(body))
    assert error.param == field
    assert field in error.message
    assert len(error.message) < 400


@pytest.mark.parametrize(
    "prompt", [["a", "b"], [1, "a"], [[1], [2]], [1.0], [True], {}, None, 5, [[["a"]]], ["a", 1]]
)
def test_a_prompt_is_one_text_or_one_list_of_ids(prompt: Any) -> None:
    error = refusal(CompletionRequest, encoded({"model": "m", "prompt": prompt}))
    assert error.param == "prompt"
    assert "one text, one list of token ids" in error.message


@pytest.mark.parametrize(
    ("prompt", "meant"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([5], [5]), ("", "")],
)
def test_the_four_spellings_of_a_prompt(prompt: Any, meant: Any) -> None:
    assert completion(prompt=prompt).prompt == meant


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
    error = refusal(ChatRequest, encoded({"model": "m", "messages": HELLO, "logit_bias": {}}))
    assert error.code == "unknown_field"
    assert "max_completion_tokens" in error.message


def test_null_means_absent() -> None:
    fields = ("max_tokens", "temperature", "top_p", "n", "seed", "stop", "stream")
    assert chat(**dict.fromkeys(fields), stream_options=None) == chat()


def test_numbers_and_stops_are_read() -> None:
    request = chat(temperature=1, top_p=1, n=1, stop="x", max_completion_tokens=7, seed=-1)
    assert (request.temperature, request.top_p, request.seed) == (1.0, 1.0, -1)
    assert request.stop == ["x"]
    assert request.asked_tokens == 7


def test_two_limits_must_agree() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).asked_tokens == 5
    body = {"model": "m", "messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}
    assert refusal(ChatRequest, encoded(body)).param == "max_tokens"


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_usage_in_streams() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True).include_usage
