"""What events of a stream mean, from our server and from others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.bench.record import Tokens
from moe_worker.bench.streamed_answer import NotACompletion, StreamedAnswer, StreamFailed

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "text", "usage", "error", "content"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


def taken(*events: Any) -> StreamedAnswer:
    answer = StreamedAnswer()
    for second, event in enumerate(events):
        answer.take(event if isinstance(event, str) else json.dumps(event), float(second))
    return answer


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}]}


def delta(**parts: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": parts, "finish_reason": None}]}


def test_a_chat_begins_with_its_first_text_and_not_with_the_role() -> None:
    answer = taken(
        delta(role="assistant", content=""),
        delta(reasoning_content="hm"),
        delta(content="a"),
        delta(tool_calls=[{"index": 0}]),
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 9,
                "completion_tokens": 4,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
        },
        "[DONE]",
    )
    assert list(answer.text_seconds) == [1.0, 2.0, 3.0]
    assert answer.tokens == Tokens(9, 4, 8)
    assert answer.is_whole
    assert answer.is_done


@pytest.mark.parametrize(
    ("events", "is_whole"),
    [([], False), ([text("a")], False), ([text("a", "length")], True), (["[DONE]"], True)],
)
def test_an_answer_is_whole_once_its_end_was_told(events: list[Any], is_whole: bool) -> None:
    assert taken(*events).is_whole == is_whole


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        (None, Tokens(None, None, None)),
        ({}, Tokens(None, None, None)),
        ({"prompt_tokens": 3}, Tokens(3, None, None)),
        ({"prompt_tokens": -3, "completion_tokens": "4"}, Tokens(None, None, None)),
        ({"completion_tokens": True, "prompt_tokens_details": None}, Tokens(None, None, None)),
    ],
)
def test_usage_is_believed_only_where_it_can_be(usage: Any, tokens: Tokens) -> None:
    assert taken({"choices": [], "usage": usage}).tokens == tokens


def test_an_error_in_the_stream_carries_the_servers_message() -> None:
    with pytest.raises(StreamFailed, match="engine is gone"):
        taken(text("a"), {"error": {"message": "the engine is gone"}})
    with pytest.raises(StreamFailed, match="plain"):
        taken({"error": "plain"})


@given(JSON)
def test_any_json_is_taken_or_refused(event: Any) -> None:
    try:
        answer = taken(event)
    except (NotACompletion, StreamFailed):
        return
    assert len(answer.text_seconds) <= 1


@pytest.mark.parametrize("event", ["", "nonsense", "[", "5", "{}", '{"choices": [3]}', "[" * 9999])
def test_what_is_no_chunk_is_refused(event: str) -> None:
    with pytest.raises(NotACompletion):
        taken(event)
