"""Signals to a real process with a scripted engine: what it still answers, and how it ends."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_worker import MODEL_NAME
from tests.support.until import until
from tests.support.worker_command import WorkerCommand, worker_command
from tests.support.worker_processes import free_network

pytestmark = pytest.mark.processes

TEXT = "/v1/completions"


@contextmanager
def worker(tmp_path: Path, drain_seconds: int, *more: str) -> Iterator[WorkerCommand]:
    host = f"{free_network()}.2"
    flags = ["tests.support.fake_worker", host, str(drain_seconds), "0.02", *more]
    with worker_command(flags, host, tmp_path / "worker.log") as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL_NAME, "prompt": "a", **fields}


def events(lines: Iterator[str]) -> list[Any]:
    texts = [line.removeprefix("data: ") for line in lines if line]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]


def text_of(chunks: list[Any]) -> str:
    return "".join(c["choices"][0]["text"] for c in chunks if "choices" in c)


def test_e07_a_running_stream_completes_and_new_requests_are_refused(tmp_path: Path) -> None:
    with worker(tmp_path, 60) as running, running.client() as client, running.client() as other:
        with client.stream("POST", TEXT, json=body(stream=True, max_tokens=150)) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            until(lambda: running.answers("/readyz", 503), "readiness is false", 1)
            refused = other.post(TEXT, json=body())
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert other.get("/healthz").status_code == 200
            *chunks, done = events(lines)
        assert done == "[DONE]"
        assert len(text_of(chunks)) >= 149
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(10) == 0
        ended = [line for line in running.log_lines() if "request ended" in line["message"]]
        assert {line["reason"] for line in ended} == {"rejected", "length"}
        assert all(line["deployment"] == "fake" and line["request_id"] for line in ended)


def test_e07_a_stream_longer_than_the_drain_ends_with_an_error_chunk(tmp_path: Path) -> None:
    with worker(tmp_path, 1) as running, running.client() as client:
        with client.stream("POST", TEXT, json=body(stream=True, max_tokens=90_000)) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            *chunks, last = events(lines)
        assert text_of(chunks)
        assert last["error"]["code"] == "drain_deadline"
        assert running.process.wait(10) == 0


def test_a_whole_answer_past_the_drain_is_503(tmp_path: Path) -> None:
    with (
        worker(tmp_path, 1) as running,
        running.client() as client,
        running.client() as other,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(client.post, TEXT, json=body(max_tokens=90_000))
        until(lambda: "moe_requests_running 1.0" in other.get("/metrics").text, "it is running")
        running.process.send_signal(signal.SIGTERM)
        answer = asked.result(20)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "drain_deadline"
        assert running.process.wait(10) == 0


def test_a_drained_worker_stays_while_its_group_needs_its_steps(tmp_path: Path) -> None:
    with worker(tmp_path, 2, "stays") as running:
        started = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
        assert time.monotonic() - started >= 2


def test_a_second_signal_ends_it_quickly(tmp_path: Path) -> None:
    with worker(tmp_path, 600, "stays") as running, running.client() as client:
        with client.stream("POST", TEXT, json=body(stream=True, max_tokens=90_000)) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            until(lambda: running.answers("/readyz", 503), "readiness is false", 1)
            running.process.send_signal(signal.SIGINT)
            *_, last = events(lines)
        assert last["error"]["code"] == "drain_deadline"
        assert running.process.wait(10) == 1
