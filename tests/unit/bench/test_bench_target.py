"""URLs as people write them, and the bodies that are sent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_worker.bench.prompts import Prompt
from moe_worker.bench.target import Endpoint, Sampling, Target, parse_url

TARGET = Target("http://h/v1", Endpoint.COMPLETIONS, "m", Sampling(0.0, False, True))


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ("http://127.0.0.2:8000", "http://127.0.0.2:8000/v1"),
        ("http://h:1/", "http://h:1/v1"),
        ("https://h/v1", "https://h/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://[::1]:8000/proxy", "http://[::1]:8000/proxy/v1"),
    ],
)
def test_a_url_may_end_before_v1(text: str, base: str) -> None:
    assert parse_url(text) == base


@pytest.mark.parametrize(
    "text",
    [
        "",
        "h:8000",
        "ftp://h",
        "http://",
        "http://u:secret@h",
        "http://h/?a=1",
        "http://h:x",
        "http://h:99999",
    ],
)
def test_what_is_no_base_url_is_refused_without_showing_a_password(text: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        parse_url(text)
    assert "secret" not in str(refused.value)


def test_a_completion_asks_for_a_stream_with_usage() -> None:
    assert TARGET.url == "http://h/v1/completions"
    assert TARGET.body(Prompt("hello", 7)) == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_wraps_a_text_and_sends_messages_as_they_are() -> None:
    chat = replace(TARGET, endpoint=Endpoint.CHAT, sampling=Sampling(1.0, True, False))
    assert chat.url == "http://h/v1/chat/completions"
    body = chat.body(Prompt("hello", 7))
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["ignore_eos"] is True
    assert "stream_options" not in body
    messages = [{"role": "system", "content": "x"}]
    assert chat.body(Prompt(messages, 7))["messages"] == messages
