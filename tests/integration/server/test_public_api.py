"""The public API over real sockets and a scripted engine: answers, streams, refusals, cancels."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from moe_api import names
from moe_api.worker import ApiLimits, WorkerPhase
from moe_worker.api.api_key import ApiKeys
from moe_worker.api.served_model import ServedModel
from tests.support.byte_tokenizer import END, byte_tokenizer
from tests.support.fake_engine import CACHED_TOKENS, FakeEngine, Script
from tests.support.http_worker import MODEL_NAME, HttpWorker, http_worker, model_with_tools
from tests.support.until import until

TOKENIZER = byte_tokenizer()
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hi"}]


def saying(text: str) -> Script:
    return lambda prompt: TOKENIZER.encode(text + END).ids


def for_ever(prompt: Sequence[int]) -> Iterator[int]:
    while True:
        yield from b"abcdefgh"


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[FakeEngine, HttpWorker]]]:
    """Starts a worker whose engine follows a script; stopped after the test."""
    open_workers = []

    def start(
        script: Script = for_ever,
        limits: ApiLimits | None = None,
        model: ServedModel | None = None,
        keys: ApiKeys | None = None,
        **engine: Any,
    ) -> tuple[FakeEngine, HttpWorker]:
        fake = FakeEngine(script, **engine)
        worker = http_worker(fake, limits, model, keys)
        open_workers.append(worker)
        return fake, worker.__enter__()

    yield start
    for worker in open_workers:
        worker.__exit__(None, None, None)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "messages": HELLO, **fields}


def text_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "hi", **fields}


def events(response: httpx.Response) -> list[Any]:
    """Parsed events of a whole stream; every line must be one."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [
        line[6:] if line == "data: [DONE]" else json.loads(line[6:], parse_constant=no_constant)
        for line in lines
    ]


def flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(chain.from_iterable(lists))


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_a_whole_chat_answer(serve: Any) -> None:
    _, worker = serve(saying("Hello 😀"))
    with worker.client() as client:
        response = client.post(CHAT, json=chat_body(temperature=0))
    answer = response.json()
    assert response.status_code == 200
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL_NAME
    assert answer["id"] == response.headers["x-request-id"]
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello 😀"}
    assert choice["finish_reason"] == "stop"
    prompt_tokens = len(TOKENIZER.encode("<|user|>\nhi<|end|>\n<|assistant|>\n").ids)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": prompt_tokens + 8,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


def test_a_chat_stream_begins_with_the_role_and_ends_with_done(serve: Any) -> None:
    _, worker = serve(saying("Hi 😀!"))
    with worker.client() as client:
        body = chat_body(stream=True, stream_options={"include_usage": True})
        response = client.post(CHAT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(response)
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["choices"][0]["delta"].get("content", "") for c in chunks[1:]] == [
        "H", "i", " ", "😀", "!", "",
    ]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 6 + ["stop"]
    assert all(c["usage"] is None for c in chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 6
    assert {c["id"] for c in [*chunks, usage]} == {response.headers["x-request-id"]}


def test_without_asking_a_stream_has_no_usage(serve: Any) -> None:
    _, worker = serve(saying("a"))
    with worker.client() as client:
        *chunks, done = events(client.post(CHAT, json=chat_body(stream=True)))
    assert done == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)


def test_text_completions_whole_and_streamed(serve: Any) -> None:
    engine, worker = serve(saying("xyz"))
    with worker.client() as client:
        whole = client.post(TEXT, json=text_body(prompt=[1, 2, 3], max_tokens=2)).json()
        *chunks, _ = events(client.post(TEXT, json=text_body(stream=True)))
    assert whole["object"] == "text_completion"
    assert whole["choices"][0]["text"] == "xy"
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["usage"]["prompt_tokens"] == 3
    assert engine.submitted[0][0] == (1, 2, 3)
    assert "".join(c["choices"][0]["text"] for c in chunks) == "xyz"


def test_e06_a_limit_in_mid_character_flushes_valid_text(serve: Any) -> None:
    _, worker = serve(saying("a😀"))
    with worker.client() as client:
        whole = client.post(TEXT, json=text_body(max_tokens=2)).json()
        *chunks, _ = events(client.post(TEXT, json=text_body(max_tokens=2, stream=True)))
    assert whole["choices"][0]["text"] == "a\ufffd"
    assert "".join(c["choices"][0]["text"] for c in chunks) == "a\ufffd"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_engines_work(serve: Any, stream: bool) -> None:
    engine, worker = serve(for_ever)
    with worker.client() as client:
        response = client.post(CHAT, json=chat_body(stop=["zzz", "efg"], stream=stream))
    if stream:
        chunks = events(response)[:-1]
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
        assert response.json()["usage"]["completion_tokens"] == 7
    assert (text, reason) == ("abcd", "stop")
    until(lambda: engine.num_running == 0, "the engine gave the request up")
    until(lambda: worker.outcomes() == {"stop": 1}, "counted as ended by a stop")


def test_the_official_client_understands_it_all(serve: Any) -> None:
    _, worker = serve(saying("Hello"))
    with openai.OpenAI(base_url=f"{worker.public_url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == [MODEL_NAME]
        whole = client.chat.completions.create(model=MODEL_NAME, messages=HELLO)  # type: ignore[arg-type]
        assert whole.choices[0].message.content == "Hello"
        assert whole.usage is not None
        stream = client.chat.completions.create(
            model=MODEL_NAME,
            messages=HELLO,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == "Hello"
        assert chunks[-1].usage == whole.usage
        assert client.completions.create(model=MODEL_NAME, prompt="x").choices[0].text == "Hello"
        with pytest.raises(openai.BadRequestError, match="at least one token"):
            client.completions.create(model=MODEL_NAME, prompt="")
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="other", messages=HELLO)  # type: ignore[arg-type]


def test_models_are_listed_and_found(serve: Any) -> None:
    _, worker = serve()
    with worker.client() as client:
        [model] = client.get("/v1/models").json()["data"]
        assert model["id"] == MODEL_NAME
        assert client.get(f"/v1/models/{MODEL_NAME}").json() == model
        assert client.get("/v1/models/org/other").status_code == 404


def test_unknown_routes_and_methods_have_openais_shape(serve: Any) -> None:
    _, worker = serve()
    with worker.client() as client:
        for method, path, status in (
            ("GET", "/nothing", 404),
            ("GET", "/v1/models/", 404),
            ("GET", "/v1/chat/completions/", 404),
            ("GET", CHAT, 405),
            ("PUT", TEXT, 405),
            ("GET", "/docs", 404),
            ("GET", names.CONTROL_STATE, 404),
            ("PUT", names.CONTROL_PLAN, 404),
            ("POST", names.CONTROL_DRAIN, 404),
            ("GET", f"{names.CONTROL_EXPERT}/0/0", 404),
        ):
            response = client.request(method, path)
            assert response.status_code == status, (method, path)
            assert response.json()["error"].keys() == {"message", "type", "param", "code"}


def test_a_body_over_the_limit_is_413_announced_or_not(serve: Any) -> None:
    engine, worker = serve(saying("ok"), ApiLimits(max_body_bytes=1024))

    def unannounced() -> Iterator[bytes]:
        for _ in range(3000):
            yield b" " * 1024

    with worker.client() as client:
        for content in (b" " * 1025, unannounced(), b" " * 10_000_000):
            response = client.post(CHAT, content=content)
            assert response.status_code == 413
            assert "1024" in response.json()["error"]["message"]
        assert client.post(CHAT, json=chat_body()).status_code == 200
    assert len(engine.submitted) == 1


def test_a_full_queue_is_429_with_retry_after(serve: Any) -> None:
    engine, worker = serve(for_ever, max_running=1, max_queued=0)
    engine.hold()
    with worker.client() as client, worker.client() as other:
        with client.stream("POST", CHAT, json=chat_body(stream=True)):
            response = other.post(CHAT, json=chat_body())
            assert response.status_code == 429
            assert response.headers["retry-after"] == "2"
            assert response.json()["error"]["code"] == "queue_full"
    until(lambda: worker.traffic.num_requests == 0, "no request is left")
    until(lambda: worker.outcomes() == {"rejected": 1, "cancelled": 1}, "both are counted")


def test_a_worker_that_does_not_serve_is_503_and_not_ready(serve: Any) -> None:
    engine, worker = serve(saying("ok"))
    with worker.client() as client:
        assert client.get("/readyz").status_code == 200
        engine.phase = WorkerPhase.DISRUPTED
        response = client.post(CHAT, json=chat_body())
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "Disrupted" in response.json()["error"]["message"]
        assert client.get("/readyz").json() == {"ready": False, "reason": "Disrupted"}
        assert client.get("/healthz").status_code == 200
        engine.healthy = False
        assert client.get("/healthz").status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_e04_a_client_that_leaves_is_cancelled(serve: Any, stream: bool) -> None:
    engine, worker = serve(for_ever, max_model_len=5000)
    engine.hold()
    with worker.client() as client:
        body = chat_body(stream=stream, max_tokens=4000)
        if stream:
            with client.stream("POST", CHAT, json=body) as response:
                lines = response.iter_lines()
                engine.step(3)
                for _ in range(5):
                    next(lines)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post(CHAT, json=body, timeout=2)
    until(lambda: engine.num_running == 0, "the engine gave the request up", 2)
    assert len(engine.cancelled) == 1
    until(lambda: worker.outcomes() == {"cancelled": 1}, "counted as cancelled")


def test_e04_a_queued_request_whose_client_leaves_is_cancelled(serve: Any) -> None:
    engine, worker = serve(for_ever, max_running=1)
    engine.hold()
    with worker.client() as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)):
            with worker.client() as second, pytest.raises(httpx.ReadTimeout):
                second.post(CHAT, json=chat_body(), timeout=2)
            until(lambda: engine.num_waiting == 0, "the queue is empty", 2)
            assert engine.num_running == 1


def test_e04_cancelling_an_unknown_request_is_404(serve: Any) -> None:
    engine, worker = serve(for_ever)
    engine.hold()
    with worker.client() as client, worker.client() as other:
        response = other.delete("/v1/requests/nobody")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "unknown_request"
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as stream:
            request_id = stream.headers["x-request-id"]
            assert other.delete(f"/v1/requests/{request_id}").status_code == 200
            text = "".join(stream.iter_text())
        assert '"code":"request_cancelled"' in text
        assert "[DONE]" not in text
        assert other.delete(f"/v1/requests/{request_id}").status_code == 404


def test_a_failed_engine_ends_streams_with_an_error_chunk(serve: Any) -> None:
    engine, worker = serve(for_ever)
    engine.hold()
    with worker.client() as client:
        with client.stream("POST", CHAT, json=chat_body(stream=True)) as response:
            engine.fail_all("a step could not be repaired")
            *_, last = [line for line in response.iter_lines() if line]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    until(lambda: worker.outcomes() == {"error": 1}, "counted as an error")


def test_metrics_count_tokens_and_hold_nothing_from_clients(serve: Any) -> None:
    _, worker = serve(saying("Hello"))
    with worker.client() as client:
        client.post(CHAT, json=chat_body(unknown="secret-field"))
        client.post(CHAT, json=chat_body(model="secret-model"))
        for _ in range(3):
            client.post(TEXT, json=text_body(prompt="secret-prompt", user="secret-user"))
        client.get("/secret-path")
        until(lambda: worker.outcomes() == {"stop": 3, "invalid": 2}, "all are counted")
        text = client.get("/metrics").text
    assert 'moe_requests_total{outcome="stop"} 3.0' in text
    assert 'moe_requests_total{outcome="invalid"} 2.0' in text
    assert "moe_time_to_first_token_seconds_count 3.0" in text
    assert "moe_inter_token_latency_seconds_count 12.0" in text
    assert 'moe_expert_tokens_total{expert="1",layer="0"} 4.0' in text
    assert "moe_rank_tokens_total 14.0" in text
    assert 'moe_kv_blocks{state="free"} 100.0' in text
    assert "secret" not in text
    assert "NaN" not in text


def test_several_answers_to_one_request(serve: Any) -> None:
    engine, worker = serve(saying("Hi"))
    with worker.client() as client:
        whole = client.post(CHAT, json=chat_body(n=3, seed=5))
        texts = client.post(TEXT, json=text_body(prompt=["ab", "xyz"], n=2)).json()
        *chunks, _ = events(client.post(CHAT, json=chat_body(n=3, stream=True)))
    answer = whole.json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in answer["choices"]} == {"Hi"}
    assert [params.seed for _, params in engine.submitted[:3]] == [5, 6, 7]
    assert answer["usage"]["completion_tokens"] == 6
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED_TOKENS}
    assert [choice["index"] for choice in texts["choices"]] == [0, 1, 2, 3]
    assert [prompt for prompt, _ in engine.submitted[3:7]] == [(97, 98)] * 2 + [(120, 121, 122)] * 2
    assert texts["usage"]["prompt_tokens"] == 5
    assert texts["usage"]["prompt_tokens_details"] == {"cached_tokens": 2 * CACHED_TOKENS}
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == "Hi"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]


def test_one_answer_at_its_stop_string_does_not_end_the_others(serve: Any) -> None:
    texts = iter(["ab.cd", "abcd"])
    engine, worker = serve(lambda prompt: TOKENIZER.encode(next(texts) + END).ids)
    with worker.client() as client:
        choices = client.post(TEXT, json=text_body(n=2, stop=".")).json()["choices"]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("ab", "stop"), ("abcd", "stop")]
    until(lambda: engine.num_running == 0, "the engine gave both up")


def test_when_not_all_answers_find_a_place_none_is_begun(serve: Any) -> None:
    engine, worker = serve(for_ever, max_running=1, max_queued=1)
    with worker.client() as client:
        response = client.post(CHAT, json=chat_body(n=3))
    assert response.status_code == 429
    until(lambda: (engine.num_running, engine.num_waiting) == (0, 0), "nothing is left")


@pytest.mark.parametrize("stream", [False, True])
def test_e04_all_answers_of_a_request_are_cancelled_by_its_id(serve: Any, stream: bool) -> None:
    engine, worker = serve(for_ever)
    engine.hold()
    with worker.client() as client, worker.client() as other:
        with client.stream("POST", CHAT, json=chat_body(n=2, stream=True)) as response:
            request_id = response.headers["x-request-id"]
            assert other.delete(f"/v1/requests/{request_id}").status_code == 200
            assert "request_cancelled" in "".join(response.iter_text())
    assert {name for name in engine.cancelled} == {f"{request_id}/0", f"{request_id}/1"}
    until(lambda: worker.outcomes() == {"cancelled": 1}, "counted once")


def test_e02_probabilities_of_impossible_tokens_are_strict_json(serve: Any) -> None:
    _, worker = serve(saying("a😀"))
    with worker.client() as client:
        asked = chat_body(logprobs=True, top_logprobs=5)
        whole = client.post(CHAT, json=asked)
        answer = json.loads(whole.text, parse_constant=no_constant)
        *chunks, _ = events(client.post(CHAT, json={**asked, "stream": True}))
        text = client.post(TEXT, json=text_body(logprobs=5))
        text_answer = json.loads(text.text, parse_constant=no_constant)
        *text_chunks, _ = events(client.post(TEXT, json=text_body(logprobs=5, stream=True)))
        assert "NaN" not in client.get("/metrics").text
    content = answer["choices"][0]["logprobs"]["content"]
    assert bytes(flat(entry["bytes"] for entry in content)).decode() == "a😀"
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [0.0] + [-9999.0] * 4
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert flat(told["content"] for told in streamed if told) == content
    told = text_answer["choices"][0]["logprobs"]
    assert told["tokens"] == ["a", "bytes:\\xf0\\x9f", "bytes:\\x98\\x80"]
    assert told["text_offset"] == [0, 1, 1]
    for key in told:
        parts = [c["choices"][0]["logprobs"] for c in text_chunks]
        assert flat(part[key] for part in parts if part) == told[key]


def test_probabilities_end_where_a_stop_string_cut_the_text(serve: Any) -> None:
    _, worker = serve(saying("abcd"))
    with worker.client() as client:
        answer = client.post(TEXT, json=text_body(logprobs=0, stop="c")).json()
    assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_begins_with_the_prompt_and_its_probabilities(serve: Any, stream: bool) -> None:
    _, worker = serve(saying("cd"))
    with worker.client() as client:
        body = text_body(prompt="ab", echo=True, logprobs=1, n=2, stream=stream)
        response = client.post(TEXT, json=body)
    for index in range(2):
        if stream:
            parts = [c["choices"][0] for c in events(response)[:-1]]
            parts = [part for part in parts if part["index"] == index]
        else:
            parts = [response.json()["choices"][index]]
        told = [part["logprobs"] for part in parts if part["logprobs"]]
        assert "".join(part["text"] for part in parts) == "abcd"
        assert flat(part["tokens"] for part in told) == ["a", "b", "c", "d"]
        assert flat(part["token_logprobs"] for part in told) == [None, 0.0, 0.0, 0.0]
        assert flat(part["text_offset"] for part in told) == [0, 1, 2, 3]


def test_an_echo_alone_is_the_prompt_and_the_answer(serve: Any) -> None:
    _, worker = serve(saying("cd"))
    with worker.client() as client:
        answer = client.post(TEXT, json=text_body(prompt="ab", echo=True)).json()
    assert answer["choices"][0] == {
        "index": 0,
        "text": "abcd",
        "logprobs": None,
        "finish_reason": "stop",
    }


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "now", "parameters": PERSON},
}
NOW = {"type": "function", "function": {"name": "now"}}


def test_an_answer_follows_the_schema_that_was_asked_for(serve: Any) -> None:
    _, worker = serve()
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    with worker.client() as client:
        for seed in range(4):
            body = chat_body(response_format=wanted, seed=seed, max_tokens=240)
            choice = client.post(CHAT, json=body).json()["choices"][0]
            if choice["finish_reason"] == "stop":
                person = json.loads(choice["message"]["content"])
                assert person.keys() == {"name", "age"}
                assert type(person["age"]) is int
        body = chat_body(response_format={"type": "json_schema", "json_schema": {"name": "x"}})
        assert client.post(CHAT, json=body | {"n": 2}).status_code == 200
        bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "y"}}}
        error = client.post(CHAT, json=chat_body(response_format=bad)).json()["error"]
    assert (error["param"], error["code"]) == ("response_format", "schema_not_supported")


class Person(BaseModel):
    name: Literal["Ada", "Zoë"]
    age: int = Field(ge=0, le=150)


def test_the_official_clients_own_helpers_parse_answers(serve: Any) -> None:
    _, worker = serve(model=model_with_tools(), max_model_len=2000)
    asked: Any = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 600, "seed": 2}
    with openai.OpenAI(base_url=f"{worker.public_url}/v1", api_key="none") as client:
        parsed = client.chat.completions.parse(**asked, response_format=Person).choices[0].message
        assert isinstance(parsed.parsed, Person)
        tools = [openai.pydantic_function_tool(Person)]
        forced: Any = {**asked, "tools": tools, "tool_choice": "required"}
        calls = client.chat.completions.parse(**forced, parallel_tool_calls=False)
        [call] = calls.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Person)
        with client.chat.completions.stream(**asked, response_format=Person) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert {"content.delta", "content.done"} <= kinds
        assert final.choices[0].message.parsed == parsed.parsed
        with client.chat.completions.stream(**forced, logprobs=True, n=2) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        assert [len(choice.message.tool_calls or []) > 0 for choice in final.choices] == [True] * 2


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "now"}}])
def test_tool_calls_whole_and_streamed(serve: Any, choice: Any) -> None:
    _, worker = serve(model=model_with_tools(), max_model_len=2000)
    body = chat_body(tools=[WEATHER, NOW], tool_choice=choice, seed=3, max_tokens=1200)
    with openai.OpenAI(base_url=f"{worker.public_url}/v1", api_key="none") as client:
        whole = client.chat.completions.create(**body).choices[0]
        deltas = [c.choices[0] for c in client.chat.completions.create(**body, stream=True)]
    assert whole.finish_reason == deltas[-1].finish_reason == "tool_calls"
    assert whole.message.content is None
    calls = whole.message.tool_calls
    assert calls
    streamed: list[dict[str, str]] = []
    for delta in deltas:
        for part in delta.delta.tool_calls or []:
            if part.id:
                assert part.index == len(streamed)
                streamed.append({"name": part.function.name, "arguments": ""})
            streamed[-1]["arguments"] += part.function.arguments or ""
    assert [call.function.model_dump() for call in calls] == [
        {"arguments": call["arguments"], "name": call["name"]} for call in streamed
    ]
    for call in calls:
        arguments = json.loads(call.function.arguments)
        assert arguments.keys() == ({"name", "age"} if call.function.name == "weather" else set())
    if choice != "required":
        assert [call.function.name for call in calls] == ["now"]


def test_tools_may_be_left_alone_and_answers_sent_back(serve: Any) -> None:
    engine, worker = serve(saying("Hello"), model=model_with_tools(), max_model_len=2000)
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    with worker.client() as client:
        body = chat_body(messages=messages, tools=[NOW], tool_choice="none")
        choice = client.post(CHAT, json=body).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello"}
    prompt = TOKENIZER.decode(list(engine.submitted[0][0]), skip_special_tokens=False)
    assert "noon" in prompt
    assert '"name": "now", "arguments": {}' in prompt


def test_a_key_is_needed_where_there_is_one(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "key").write_text("a-long-secret\n")
    engine, worker = serve(saying("ok"), keys=ApiKeys(tmp_path / "key"))
    url = f"{worker.public_url}/v1"
    with openai.OpenAI(base_url=url, api_key="a-long-secret") as client:
        answer = client.chat.completions.create(model=MODEL_NAME, messages=HELLO)  # type: ignore[arg-type]
        assert answer.choices[0].message.content == "ok"
    with openai.OpenAI(base_url=url, api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError, match="not right") as caught:
            client.models.list()
        assert caught.value.code == "invalid_api_key"
    with worker.client() as client:
        response = client.post(CHAT, json=chat_body())
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert client.post(CHAT, content=b" " * 900_000).status_code == 401
        assert client.get("/readyz").status_code == 200
        assert "moe_requests_total" in client.get("/metrics").text
    assert len(engine.submitted) == 1


def test_e09_what_finds_no_place_is_told_at_once_and_nobody_is_forgotten(serve: Any) -> None:
    engine, worker = serve(saying("ok"), max_running=2, max_queued=4)
    engine.hold()
    with ThreadPoolExecutor(10) as threads, worker.client() as client:
        sent = [threads.submit(client.post, CHAT, json=chat_body()) for _ in range(10)]
        until(lambda: sum(request.done() for request in sent) == 4, "four are refused")
        until(lambda: (engine.num_running, engine.num_waiting) == (2, 4), "six are taken")
        engine.release()
        answers = [request.result() for request in sent]
    assert sorted(answer.status_code for answer in answers) == [200] * 6 + [429] * 4
    assert all(a.headers["retry-after"] for a in answers if a.status_code == 429)
    until(lambda: worker.traffic.num_requests == 0, "no request is left")
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    until(lambda: worker.outcomes() == {"stop": 6, "rejected": 4}, "all are counted")
