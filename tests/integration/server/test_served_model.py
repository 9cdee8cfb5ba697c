"""A real worker process with the example model: bad requests, cancels, whole characters, drain."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from moe_api import names
from moe_api.load import LoadReport
from moe_api.worker import WorkerPhase
from tests.support.served_model import (
    MODEL_NAME,
    TOKEN,
    serve_command,
    serving_worker,
    state_of,
)
from tests.support.until import until
from tests.support.worker_command import WorkerCommand, started
from tests.support.worker_processes import free_network

pytestmark = pytest.mark.processes

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "What does os.path.join do?"}]
LONG: dict[str, Any] = {"prompt": "import os\n", "max_tokens": 2000, "seed": 1, "temperature": 1}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerCommand]:
    with serving_worker(tmp_path_factory.mktemp("worker")) as running:
        yield running


@pytest.fixture
def client(worker: WorkerCommand) -> Iterator[httpx.Client]:
    with worker.client() as client:
        yield client


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, **fields}


def events(lines: Iterator[str]) -> list[Any]:
    texts = [line.removeprefix("data: ") for line in lines if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if c != "[DONE]" and c["choices"])


def counted(worker: WorkerCommand, outcome: str) -> int:
    text = httpx.get(f"{worker.public_url}/metrics").text
    [line] = [
        x for x in text.splitlines() if x.startswith(f'moe_requests_total{{outcome="{outcome}"}}')
    ]
    return int(float(line.split()[-1]))


def test_e01_bad_input_is_4xx_and_never_reaches_the_engine(
    worker: WorkerCommand, client: httpx.Client
) -> None:
    bad: list[tuple[str, Any]] = [
        (CHAT, body(messages=HELLO, **fields))
        for fields in (
            {"logit_bias": {"99999999": 1}},
            {"logit_bias": {str(i): 1 for i in range(2000)}},
            {"stop": [f"s{i}" for i in range(5000)]},
            {"max_tokens": 0},
            {"max_tokens": -1},
            {"max_tokens": 1e12},
            {"max_tokens": 10**12},
            {"max_tokens": "5"},
            {"max_tokens": 2048},
            {"temperature": float("nan")},
            {"temperature": -1},
            {"top_p": 0},
            {"top_p": 2},
            {"n": 0},
            {"n": 9},
            {"top_k": -2},
            {"min_p": 2},
            {"frequency_penalty": 3},
            {"repetition_penalty": 0},
            {"top_logprobs": 3},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            {"logit_bias": {"1792": 1}},
        )
    ]
    bad += [
        (CHAT, body(messages=[])),
        (CHAT, body(messages=[{"role": "user", "content": "x" * 2_000_000}])),
        (CHAT, b'{"model": '),
        (CHAT, b"x" * 10_000_000),
        (TEXT, body(prompt=[1792])),
        (TEXT, body(prompt=[-1])),
        (TEXT, body(prompt=[5] * 2048)),
        (TEXT, body(prompt="")),
    ]
    normal = body(messages=HELLO, max_tokens=4, temperature=0)
    expected = client.post(CHAT, json=normal).json()["choices"]
    incarnation = state_of(worker).incarnation
    for path, wrong in bad:
        content = wrong if isinstance(wrong, bytes) else json.dumps(wrong).encode()
        response = client.post(path, content=content)
        assert 400 <= response.status_code < 500, (content[:100], response.text)
        assert response.json()["error"]["message"]
        answer = client.post(CHAT, json=normal)
        assert answer.status_code == 200
        assert answer.json()["choices"] == expected
    assert state_of(worker).incarnation == incarnation


def test_the_official_client_streams_the_same_as_a_whole_answer(worker: WorkerCommand) -> None:
    asked: dict[str, Any] = {"model": MODEL_NAME, "messages": HELLO, "max_tokens": 24}
    with openai.OpenAI(base_url=f"{worker.public_url}/v1", api_key="none") as client:
        for more in ({"temperature": 0}, {"temperature": 1, "top_p": 0.9, "seed": 7}):
            whole = client.chat.completions.create(**asked, **more)
            stream = client.chat.completions.create(
                **asked, **more, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == whole.choices[0].message.content
            assert chunks[-1].usage == whole.usage
            assert whole.usage.completion_tokens <= 24


def test_e04_a_client_that_leaves_mid_stream_frees_everything(
    worker: WorkerCommand, client: httpx.Client
) -> None:
    before = counted(worker, "cancelled")
    with client.stream("POST", TEXT, json=body(**LONG, stream=True)) as stream:
        lines = stream.iter_lines()
        for _ in range(6):
            next(lines)
    until(lambda: state_of(worker).requests_running == 0, "nothing runs", 2)
    state = state_of(worker)
    assert (state.requests_waiting, state.kv_blocks_used) == (0, 0)
    assert counted(worker, "cancelled") == before + 1


def test_e04_cancelling_by_id(worker: WorkerCommand, client: httpx.Client) -> None:
    assert client.delete("/v1/requests/nobody").status_code == 404
    with client.stream("POST", TEXT, json=body(**LONG, stream=True)) as stream:
        request_id = stream.headers["x-request-id"]
        with worker.client() as other:
            assert other.delete(f"/v1/requests/{request_id}").status_code == 200
        *_, last = events(stream.iter_lines())
        assert last["error"]["code"] == "request_cancelled"
        assert client.delete(f"/v1/requests/{request_id}").status_code == 404


def test_e06_streams_hold_whole_characters_and_equal_the_whole_text(client: httpx.Client) -> None:
    for seed in range(3):
        asked = body(prompt="ä 你好 😀 é", max_tokens=24, temperature=2, seed=seed)
        response = client.post(TEXT, json={**asked, "stream": True})
        response.content.decode("utf-8", "strict")
        streamed = text_of(events(iter(response.text.split("\n\n"))))
        assert client.post(TEXT, json=asked).json()["choices"][0]["text"] == streamed
        shorter = client.post(TEXT, json={**asked, "max_tokens": 9}).json()["choices"][0]["text"]
        # A character that the limit cut is flushed as one mark; what is before it is a prefix.
        assert streamed.startswith(shorter.removesuffix("\ufffd"))


def test_a_stop_string_over_token_borders_never_leaks(client: httpx.Client) -> None:
    asked = body(prompt="import os\n", max_tokens=40, temperature=0)
    whole = client.post(TEXT, json=asked).json()["choices"][0]["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 7]
    for stream in (False, True):
        response = client.post(TEXT, json={**asked, "stop": stop, "stream": stream})
        if stream:
            chunks = events(iter(response.text.split("\n\n")))
            text, reason = text_of(chunks), chunks[-2]["choices"][0]["finish_reason"]
        else:
            choice = response.json()["choices"][0]
            text, reason = choice["text"], choice["finish_reason"]
        assert text == whole[: whole.index(stop)]
        assert reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_e02_probabilities_when_all_but_one_token_are_impossible(
    client: httpx.Client, stream: bool
) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "ok"}}}
    asked = body(
        messages=HELLO, response_format=wanted, logprobs=True, top_logprobs=5, stream=stream
    )
    response = client.post(CHAT, json=asked)
    assert response.status_code == 200
    assert "Infinity" not in response.text
    if stream:
        chunks = events(iter(response.text.split("\n\n")))[:-1]
        told = [c["choices"][0]["logprobs"] for c in chunks]
        content = [entry for part in told if part for entry in part["content"]]
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content) == b'"ok"'
    assert all(entry["logprob"] == 0.0 for entry in content)
    assert all(len(entry["top_logprobs"]) == 5 for entry in content)
    assert {top["logprob"] for entry in content for top in entry["top_logprobs"][1:]} == {-9999.0}


def test_a_seed_gives_the_same_answers_alone_and_together(client: httpx.Client) -> None:
    asked = body(
        prompt="import os\n",
        max_tokens=24,
        temperature=1.2,
        top_k=50,
        min_p=0.01,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logprobs=2,
    )
    together = client.post(TEXT, json={**asked, "n": 4, "seed": 11}).json()
    for index, choice in enumerate(together["choices"]):
        [alone] = client.post(TEXT, json={**asked, "seed": 11 + index}).json()["choices"]
        assert {**choice, "index": 0} == alone
    assert len({choice["text"] for choice in together["choices"]}) > 1
    both = client.post(TEXT, json={**asked, "prompt": ["import os\n", "def f("], "seed": 11}).json()
    assert {**both["choices"][0], "index": 0} == {**together["choices"][0], "index": 0}
    assert both["usage"]["prompt_tokens"] > together["usage"]["prompt_tokens"]


def test_an_echo_judges_the_prompt_as_the_answer_was_judged(client: httpx.Client) -> None:
    first = body(prompt="import os\n", max_tokens=12, temperature=0, logprobs=1, echo=True)
    whole = client.post(TEXT, json=first).json()["choices"][0]
    again = {**first, "prompt": whole["text"], "max_tokens": 1}
    judged = client.post(TEXT, json=again).json()["choices"][0]
    count = len(whole["logprobs"]["tokens"])
    if judged["logprobs"]["tokens"][:count] == whole["logprobs"]["tokens"]:
        told = judged["logprobs"]["token_logprobs"][:count]
        assert told == whole["logprobs"]["token_logprobs"], "bit for bit, prompt or answer"
    assert whole["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in judged["logprobs"]["token_logprobs"][1:])
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]


def test_penalties_and_biases_are_felt(client: httpx.Client) -> None:
    asked = body(prompt="import os\n", max_tokens=30, temperature=0)
    plain = client.post(TEXT, json={**asked, "logprobs": 0}).json()["choices"][0]
    ids = client.post(TEXT, json={**asked, "frequency_penalty": 2, "presence_penalty": 2}).json()
    assert ids["choices"][0]["text"] != plain["text"]
    tokens = plain["logprobs"]["tokens"]
    repeated = max(map(tokens.count, tokens))
    penalised = client.post(TEXT, json={**asked, "repetition_penalty": 5, "logprobs": 0}).json()
    fresh = penalised["choices"][0]["logprobs"]["tokens"]
    assert max(map(fresh.count, fresh)) < repeated
    forced = client.post(TEXT, json={**asked, "logit_bias": {"65": 100}, "max_tokens": 5}).json()
    assert len(set(forced["choices"][0]["text"])) == 1


def test_an_answer_of_a_given_form(worker: WorkerCommand) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "size": {"type": "integer", "maximum": 99}},
        "required": ["ok", "size"],
        "additionalProperties": False,
    }
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    with openai.OpenAI(base_url=f"{worker.public_url}/v1", api_key="none") as client:
        for seed in range(3):
            answer = client.chat.completions.create(
                model=MODEL_NAME,
                messages=HELLO,  # type: ignore[arg-type]
                response_format=wanted,
                seed=seed,
                max_tokens=200,
            )
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            found = json.loads(choice.message.content or "")
            assert type(found["ok"]) is bool
            assert type(found["size"]) is int
            assert found["size"] <= 99


def test_a_prompt_seen_before_is_found_in_the_cache(client: httpx.Client) -> None:
    asked = body(prompt=[7] * 100, max_tokens=2, temperature=0)
    first = client.post(TEXT, json=asked).json()
    second = client.post(TEXT, json=asked).json()
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
    assert second["choices"] == first["choices"]
    judged = client.post(TEXT, json={**asked, "echo": True, "logprobs": 0}).json()
    assert len(judged["choices"][0]["logprobs"]["tokens"]) == 102
    assert judged["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_e09_every_request_of_a_burst_is_answered(tmp_path: Path) -> None:
    scheduler = {"maxRunning": 2, "maxQueued": 4}
    with serving_worker(tmp_path, scheduler=scheduler) as running, running.client() as client:
        client.timeout = httpx.Timeout(200)
        asked = body(**{**LONG, "max_tokens": 100, "ignore_eos": True})
        with ThreadPoolExecutor(10) as threads:
            sent = [threads.submit(client.post, TEXT, json=asked) for _ in range(10)]
            answers = [request.result() for request in sent]
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200] * 6 + [429] * 4
        assert all(a.headers["retry-after"] for a in answers if a.status_code == 429)
        until(lambda: state_of(running).requests_running == 0, "nothing runs")
        assert state_of(running).requests_waiting == 0
        # Counted when the answer is sent, which is before its sender looks.
        until(lambda: (counted(running, "length"), counted(running, "rejected")) == (6, 4), "all")


def test_a_worker_with_keys_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-long-secret\n")
    with serving_worker(tmp_path, api={"keyFile": str(tmp_path / "keys")}) as running:
        with running.client() as client:
            assert client.get("/v1/models").status_code == 401
            headers = {"Authorization": "Bearer a-long-secret"}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert "a-long-secret" not in running.log()


def test_counters_agree_with_the_answers(worker: WorkerCommand, client: httpx.Client) -> None:
    def totals() -> dict[str, float]:
        lines = [x.split() for x in client.get("/metrics").text.splitlines() if x[0] != "#"]
        return {name: float(value) for name, value in lines}

    until(lambda: state_of(worker).requests_running == 0, "nothing runs")
    before = totals()
    usage = client.post(TEXT, json=body(prompt=[5, 6, 7], max_tokens=9)).json()["usage"]
    until(lambda: state_of(worker).requests_running == 0, "nothing runs")
    after = totals()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("moe_prompt_tokens_total") == usage["prompt_tokens"] == 3
    assert grown("moe_generated_tokens_total") == usage["completion_tokens"]
    with worker.control(TOKEN) as control:
        load = LoadReport.from_json(control.get(names.CONTROL_LOAD).content)
    assert sum(map(sum, load.routed)) == sum(map(sum, load.served))
    assert after["moe_rank_tokens_total"] == sum(map(sum, load.served))
    # The last token is not computed with: it is only sent.
    computed = usage["total_tokens"] - 1
    assert grown("moe_rank_tokens_total") == computed * 4 * 2  # layers × top-k


def test_e07_sigterm_lets_a_running_stream_complete(tmp_path: Path) -> None:
    with serving_worker(tmp_path, drainSeconds=60) as running:
        with running.client() as client, running.client() as other:
            asked = body(**{**LONG, "max_tokens": 120}, stream=True)
            with client.stream("POST", TEXT, json=asked) as stream:
                lines = stream.iter_lines()
                next(lines)
                running.process.send_signal(signal.SIGTERM)
                until(lambda: running.answers("/readyz", 503), "readiness is false", 1)
                assert other.post(TEXT, json=body(**LONG)).status_code == 503
                assert state_of(running).phase is WorkerPhase.DRAINING
                *chunks, done = events(lines)
            assert done == "[DONE]"
            assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
        assert running.process.wait(30) == 0, running.log()


def test_a_signal_during_the_start_ends_it_at_once(tmp_path: Path) -> None:
    host = f"{free_network()}.2"
    command = serve_command(tmp_path, host)
    with started(command, host, tmp_path / "worker.log") as starting:
        until(lambda: " starts" in starting.log(), "it has begun to start", 60)
        starting.process.send_signal(signal.SIGTERM)
        assert starting.process.wait(30) == 0, starting.log()


def test_e07_a_stream_longer_than_the_drain_ends_with_an_error_chunk(tmp_path: Path) -> None:
    with serving_worker(tmp_path, drainSeconds=0) as running, running.client() as client:
        with client.stream("POST", TEXT, json=body(**LONG, stream=True)) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            *_, last = events(lines)
        assert last["error"]["code"] == "drain_deadline"
        assert running.process.wait(30) == 0, running.log()
