"""Who may use the public API: keys in a file, compared in full, never told."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from moe_worker.api.api_key import ApiKeys, ApiKeysUnusable, RequireKey

FIRST, SECOND = "first-key-0001", "second-key-0002"


def write(path: Path, text: str) -> Path:
    """In one step, as the kubelet replaces a mounted Secret."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, path)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "key", f"{FIRST}\n{SECOND}\n")


async def ok(request: Request) -> Response:
    return PlainTextResponse("ok")


async def status(keys: ApiKeys, path: str, *authorization: str) -> int:
    routes = [Route("/v1/models", ok), Route("/healthz", ok)]
    app = Starlette(routes=routes, middleware=[Middleware(RequireKey, keys=keys)])
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"authorization", value.encode("latin-1")) for value in authorization]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    await app(scope, receive, send)
    code: int = sent[0]["status"]
    return code


@pytest.mark.parametrize(
    ("path", "authorization", "expected"),
    [
        ("/v1/models", [f"Bearer {FIRST}"], 200),
        ("/v1/models", [f"bearer {SECOND}"], 200),
        ("/v1/models", [f"Bearer  {SECOND} "], 200),
        ("/v1/models", [], 401),
        ("/v1/models", [""], 401),
        ("/v1/models", ["Bearer "], 401),
        ("/v1/models", [FIRST], 401),
        ("/v1/models", [f"Basic {FIRST}"], 401),
        ("/v1/models", [f"Bearer {FIRST}x"], 401),
        ("/v1/models", [f"Bearer {FIRST[:-1]}"], 401),
        ("/v1/models", [f"Bearer {FIRST} {SECOND}"], 401),
        ("/v1/models", ["Bearer ÿÿÿÿÿÿÿÿ"], 401),
        ("/v1/models", [f"Bearer {FIRST}", f"Bearer {FIRST}"], 401),
        ("/v1/nothing", [], 401),
        ("/healthz", [], 200),
    ],
)
def test_who_comes_through(file: Path, path: str, authorization: list[str], expected: int) -> None:
    assert asyncio.run(status(ApiKeys(file), path, *authorization)) == expected


def test_a_new_key_counts_at_once_and_an_old_one_no_more(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.allow(FIRST)
    write(file, "third-key-0003")
    assert keys.allow("third-key-0003")
    assert not keys.allow(FIRST)


def test_a_broken_change_leaves_the_keys_in_force_and_is_told_without_them(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    with caplog.at_level(logging.INFO):
        write(file, "")
        assert keys.allow(FIRST)
        assert not keys.allow("wrong-key-9999")
    assert "must hold 1 to 16 keys" in caplog.text
    assert FIRST not in caplog.text
    assert "wrong-key-9999" not in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "1 to 16 keys"),
        (" \n ", "1 to 16 keys"),
        ("key-number-1 " * 17, "1 to 16 keys"),
        ("short", "at least 8 characters"),
    ],
)
def test_a_file_without_usable_keys_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ApiKeysUnusable, match=reason):
        ApiKeys(write(tmp_path / "key", text))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ApiKeysUnusable, match="nowhere"):
        ApiKeys(tmp_path / "nowhere")
