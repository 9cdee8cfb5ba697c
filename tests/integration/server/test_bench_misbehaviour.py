"""`moe-worker bench` against servers that misbehave: each way has its outcome."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_worker.main import build_parser
from tests.support.raw_server import STREAM_HEAD, raw_server

PIECE = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
END = b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
WHOLE = STREAM_HEAD + PIECE + END + USAGE + DONE
CHUNKED = STREAM_HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked")
Answer = bytes | Callable[[socket.socket], None]


def plain(status: str, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


def without_end(connection: socket.socket) -> None:
    """A piece now and then, until the client leaves."""
    connection.sendall(STREAM_HEAD)
    pause = threading.Event()
    while not pause.wait(0.02):
        connection.sendall(PIECE)


def open_afterwards(connection: socket.socket) -> None:
    connection.sendall(WHOLE)
    silent(connection)


def byte_by_byte(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in WHOLE:
        connection.sendall(bytes([byte]))


def measured(
    answers: list[Answer], folder: Path, *flags: str
) -> tuple[int, dict[str, Any], list[bytes]]:
    """Exit code, result, requests. A probe comes first and is answered; the last answer repeats."""

    def script(connection: socket.socket, index: int) -> None:
        answer = WHOLE if index == 0 else answers[min(index, len(answers)) - 1]
        if isinstance(answer, bytes):
            connection.sendall(answer)
        else:
            answer(connection)

    prompts, path = folder / "prompts.txt", folder / "result.json"
    prompts.write_text("hello\n")
    with raw_server(script) as server:
        parsed = build_parser({}).parse_args(
            ["bench", "--url", server.url, "--model", "m", "--prompts", str(prompts),
             "--json", str(path), "--requests", "1", *flags]
        )  # fmt: skip
        code = parsed.run(parsed)
        return code, json.loads(path.read_text()), server.requests


REFUSED = plain("429 Too Many Requests", b'{"error":{"message":"full"}}')
LATER = plain("429 Too Many Requests", b'{"error":{"message":"full"}}', "Retry-After: 0")
MUCH_LATER = plain("503 Service Unavailable", b"{}", "Retry-After: 100000")


@pytest.mark.parametrize(
    ("answer", "outcome", "detail"),
    [
        (STREAM_HEAD + PIECE + END[:20], "cut_off", "the stream ended before the answer did"),
        (STREAM_HEAD + PIECE, "cut_off", "the stream ended before the answer did"),
        (STREAM_HEAD, "cut_off", "the stream ended before the answer did"),
        (CHUNKED + b"400\r\n" + PIECE + END, "cut_off", "peer closed connection"),
        (b"", "cut_off", "disconnected"),
        (b"SSH-2.0-server\r\n\r\n", "cut_off", "illegal status line"),
        (plain("200 OK", b"{}", "Content-Type: application/json"), "malformed", "200 with appli"),
        (plain("200 OK", b"hello"), "malformed", "200 with no content type"),
        (STREAM_HEAD + b"data: hello\n\n", "malformed", "no JSON: 'hello'"),
        (STREAM_HEAD + b"data: {}\n\n", "malformed", "without choices"),
        (STREAM_HEAD + b"data: \xff\n\n", "malformed", "not UTF-8"),
        (STREAM_HEAD + PIECE + b'data: {"error":{"message":"lost"}}\n\n', "server_error", "lost"),
        (plain("500 Internal Server Error", b"oops"), "server_error", "500: oops"),
        (MUCH_LATER, "server_error", "503"),
        (plain("404 Not Found", b'{"error":{"message":"no m"}}'), "client_error", "404: no m"),
        (plain("302 Found", b"", "Location: http://192.0.2.1/"), "client_error", "302"),
        (REFUSED, "refused", "429: full"),
        (LATER, "refused", "429: full"),
    ],
    ids=[
        "half a line", "no end", "nothing", "half a chunk", "no head", "no HTTP", "JSON", "text",
        "events of text", "events of nothing", "events of bytes", "error in the stream", "500",
        "503", "404", "302", "429", "429 with Retry-After",
    ],
)  # fmt: skip
def test_what_is_no_answer_fails_with_its_outcome(
    answer: Answer, outcome: str, detail: str, tmp_path: Path
) -> None:
    code, found, _ = measured([answer], tmp_path)
    assert code == 1
    assert {name: n for name, n in found["requests"]["outcomes"].items() if n} == {outcome: 1}
    (failure,) = found["failures"]
    assert failure.startswith(f"{outcome}: ")
    assert detail in failure
    assert found["latency_seconds"]["ttft"] is None
    assert found["tokens"]["output"] == 0


@pytest.mark.parametrize(
    ("answer", "detail"), [(silent, "without text"), (without_end, "pieces of text")]
)
def test_what_does_not_end_times_out(answer: Answer, detail: str, tmp_path: Path) -> None:
    code, found, _ = measured([answer], tmp_path, "--timeout", "3")
    assert code == 1
    assert found["requests"]["outcomes"]["timed_out"] == 1
    (failure,) = found["failures"]
    assert detail in failure


def test_a_request_whose_time_is_over_is_not_sent(tmp_path: Path) -> None:
    code, found, requests = measured(
        [silent], tmp_path, "--rate", "1000", "--max-connections", "1", "--requests", "3",
        "--timeout", "3",
    )  # fmt: skip
    assert code == 1
    assert found["requests"]["outcomes"]["timed_out"] == 3
    assert any("no connection was free" in failure for failure in found["failures"])
    assert len(requests) < 4


@pytest.mark.parametrize(
    ("answer", "tokens", "without_usage"),
    [
        (WHOLE, 2, 0),
        (byte_by_byte, 2, 0),
        (open_afterwards, 2, 0),
        (STREAM_HEAD + (PIECE + END + USAGE + DONE).replace(b"\n", b"\r\n"), 2, 0),
        (STREAM_HEAD + PIECE + PIECE + END + DONE, 3, 1),
        (STREAM_HEAD + PIECE + END, 2, 1),
        (STREAM_HEAD + b": hello\n\n" + DONE, 0, 1),
    ],
    ids=["whole", "bytes", "not closed", "CRLF", "no usage", "not done", "empty"],
)
def test_what_is_whole_is_an_answer_however_it_comes(
    answer: Answer, tokens: int, without_usage: int, tmp_path: Path
) -> None:
    code, found, _ = measured([answer], tmp_path)
    assert code == 0, found["failures"]
    assert found["tokens"]["output"] == tokens
    assert found["tokens"]["answers_without_usage"] == without_usage


def test_a_refusal_is_waited_out_as_often_as_allowed(tmp_path: Path) -> None:
    code, found, requests = measured([LATER, LATER, WHOLE], tmp_path, "--retries", "2")
    assert (code, found["requests"]["retries"], len(requests)) == (0, 2, 4)
    code, found, requests = measured([LATER], tmp_path, "--retries", "2")
    assert (code, found["requests"]["retries"], len(requests)) == (1, 2, 4)
    # One that could not end in time anyway is not waited for.
    code, found, requests = measured([MUCH_LATER], tmp_path, "--retries", "2")
    assert (code, found["requests"]["retries"], len(requests)) == (1, 0, 2)


def test_the_key_and_the_body_arrive(tmp_path: Path) -> None:
    _, found, requests = measured([WHOLE], tmp_path, "--api-key", "k-123", "--max-tokens", "3")
    head, _, body = requests[1].partition(b"\r\n\r\n")
    assert b"Authorization: Bearer k-123" in head
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert json.loads(body)["max_tokens"] == 3
    assert "k-123" not in json.dumps(found)
