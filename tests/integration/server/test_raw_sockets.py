"""Clients that do not behave: half requests, cut connections, endless headers, readers that stop.

Each is shut off or waited out within bounds, and the next client is served as if nothing was.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from moe_worker import listener
from moe_worker.api import answer, body
from tests.support.byte_tokenizer import END, byte_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.http_worker import MODEL_NAME, HttpWorker, http_worker
from tests.support.until import until

TOKENIZER = byte_tokenizer()
PATH = "/v1/completions"


def for_ever(prompt: Sequence[int]) -> Iterator[int]:
    while True:
        yield from b"abcdefgh"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(for_ever, max_model_len=200_000)


@pytest.fixture
def worker(engine: FakeEngine) -> Iterator[HttpWorker]:
    with http_worker(engine) as running:
        yield running


@contextmanager
def connected(worker: HttpWorker, receive_bytes: int | None = None) -> Iterator[socket.socket]:
    host, port = worker.public_url.removeprefix("http://").split(":")
    with socket.socket() as client:
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(20)
        client.connect((host, int(port)))
        yield client


def request(**fields: Any) -> bytes:
    content = json.dumps({"model": MODEL_NAME, "prompt": "hi", **fields}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def until_closed(client: socket.socket) -> bytes:
    """All that still comes before the server closes the connection."""
    received = b""
    try:
        while chunk := client.recv(65536):
            received += chunk
    except ConnectionResetError:
        pass
    return received


def still_serves(worker: HttpWorker) -> bool:
    with worker.client() as client:
        asked = {"model": MODEL_NAME, "prompt": "hi", "max_tokens": 3}
        return client.post(PATH, json=asked).json()["choices"][0]["text"] == "abc"


def test_headers_that_never_end_close_the_connection(
    worker: HttpWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_SECONDS", 1)
    for begun in (b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"):
        with connected(worker) as client:
            client.sendall(begun)
            assert until_closed(client) == b""
    monkeypatch.undo()
    assert still_serves(worker)


def test_a_second_request_on_a_connection_has_its_own_time(
    worker: HttpWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "HEADER_SECONDS", 1)
    with connected(worker) as client:
        client.sendall(request(max_tokens=1))
        first = client.recv(65536)
        assert b" 200 OK" in first
        client.sendall(b"POST /v1/comp")
        assert b"HTTP/1.1" not in until_closed(client)
    monkeypatch.undo()
    assert still_serves(worker)


def test_a_body_that_never_ends_is_told_so(
    worker: HttpWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "READ_SECONDS", 1)
    with connected(worker) as client:
        client.sendall(request()[:-5])
        received = client.recv(65536)
    assert b" 408 " in received
    assert b"body_too_slow" in received
    monkeypatch.undo()
    assert still_serves(worker)


def test_a_huge_header_is_refused(worker: HttpWorker) -> None:
    with connected(worker) as client:
        try:
            client.sendall(b"GET /v1/models HTTP/1.1\r\nX-Large: " + b"a" * 1_000_000)
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not even read all of it
        received = until_closed(client)
    assert received == b"" or b" 400 " in received
    assert still_serves(worker)


@pytest.mark.parametrize(
    "wrong",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"HELO there\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n"
        b"Content-Length: 2\r\n\r\nab",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_http_is_refused(worker: HttpWorker, wrong: bytes) -> None:
    with connected(worker) as client:
        client.sendall(wrong)
        client.shutdown(socket.SHUT_WR)
        received = until_closed(client)
    assert received == b"" or b" 400 " in received
    assert still_serves(worker)


@pytest.mark.parametrize("cut", [10, -5])
def test_a_request_that_is_cut_off_leaves_nothing(
    engine: FakeEngine, worker: HttpWorker, cut: int
) -> None:
    with connected(worker) as client:
        client.sendall(request()[:cut])
    until(lambda: worker.traffic.num_requests == 0, "no request is under way")
    assert still_serves(worker)
    assert len(engine.submitted) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_e04_a_connection_that_is_reset_frees_everything(
    engine: FakeEngine, worker: HttpWorker, stream: bool
) -> None:
    engine.hold()
    with connected(worker) as client:
        client.sendall(request(stream=stream, max_tokens=4096, n=3))
        until(lambda: engine.num_running == 3, "all three answers are begun")
        engine.step(3)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    until(lambda: engine.num_running == 0, "the engine gave them up", 2)
    assert len(engine.cancelled) == 3
    until(lambda: worker.outcomes() == {"cancelled": 1}, "one request is counted")
    engine.release()
    assert still_serves(worker)


def test_a_reader_that_stops_does_not_hold_up_the_others_and_is_given_up(
    engine: FakeEngine, worker: HttpWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer, "SEND_SECONDS", 1)
    with connected(worker, receive_bytes=4096) as client:
        client.sendall(request(stream=True, max_tokens=150_000, logprobs=20))
        until(lambda: engine.num_running == 1, "it runs")
        assert still_serves(worker)
        until(lambda: worker.outcomes().get("cancelled") == 1, "the reader is given up", 30)
        until(lambda: engine.num_running == 0, "its work ended")
    assert still_serves(worker)


def test_a_slow_reader_gets_all_of_it(worker: HttpWorker, engine: FakeEngine) -> None:
    engine.script = lambda prompt: TOKENIZER.encode("x" * 3000 + END).ids
    with connected(worker, receive_bytes=4096) as client:
        asked = request(stream=True, max_tokens=4000)
        client.sendall(asked.replace(b"Host: x\r\n", b"Host: x\r\nConnection: close\r\n"))
        received = b""
        while chunk := client.recv(512):
            received += chunk
    assert received.count(b'"text":"x"') == 3000
    assert b"data: [DONE]" in received
