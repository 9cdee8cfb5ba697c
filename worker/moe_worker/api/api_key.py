"""The key that clients of the public API must send, where the deployment has one.

The file is a mounted Secret: one key a line, so that a new one can be handed out before the old one
ends. It is read again when it changes. Nothing of a key, right or wrong, is logged or answered.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from contextlib import suppress
from pathlib import Path

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_worker.api.api_error import ApiError

logger = logging.getLogger(__name__)

MAX_KEYS = 16
MIN_KEY_CHARACTERS = 8
MAX_DISCARDED_BYTES = 1024 * 1024
DISCARD_SECONDS = 5.0
GUARDED_PREFIX = "/v1/"
"""Probes and metrics are for the kubelet and Prometheus, who have no key."""


class ApiKeysUnusable(ValueError):
    """The file can not be read, or holds no keys."""


class ApiKeys:
    """The keys in a file, as they are now."""

    def __init__(self, path: Path) -> None:
        """Raises ApiKeysUnusable naming the file."""
        self._path = path
        self._stamp = _stamp(path)
        self._keys = _read(path)

    def allow(self, given: str) -> bool:
        """Compares with every key, in a time that does not tell how much of one was right."""
        self._read_again()
        right = [hmac.compare_digest(given.encode(), key) for key in self._keys]
        return any(right)

    def _read_again(self) -> None:
        try:
            stamp = _stamp(self._path)
            if stamp != self._stamp:
                self._keys, self._stamp = _read(self._path), stamp
                logger.info("the API keys were read again: %d", len(self._keys))
        except ApiKeysUnusable as error:
            logger.warning("the API keys before stay in force: %s", error)


class RequireKey:
    """Lets nothing through to the public API without a key, unknown routes included."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(GUARDED_PREFIX):
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        # Closing a connection with unread bytes resets it before the client has read the answer.
        await _discard_body(receive)
        headers = {"WWW-Authenticate": "Bearer", "Connection": "close"}
        answer = JSONResponse(refusal.to_wire(), refusal.status, headers)
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if not given:
            message = 'No API key was sent; send "Authorization: Bearer KEY".'
            return ApiError(401, message, code="missing_api_key")
        kind, _, key = given[0].decode("latin-1").partition(" ")
        if len(given) == 1 and kind.lower() == "bearer" and self._keys.allow(key.strip()):
            return None
        return ApiError(401, "The API key is not right.", code="invalid_api_key")


async def _discard_body(receive: Receive) -> None:
    """Read past the body, within bounds: it comes from somebody without a key."""
    left = MAX_DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while left > 0:
                message = await receive()
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
                left -= len(message.get("body", b""))


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise ApiKeysUnusable(f"can not read {path}: {error.strerror}") from error
    return found.st_ino, found.st_mtime_ns


def _read(path: Path) -> list[bytes]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ApiKeysUnusable(f"can not read {path}: {error}") from error
    if not 1 <= len(lines) <= MAX_KEYS:
        raise ApiKeysUnusable(f"{path} must hold 1 to {MAX_KEYS} keys, one a line")
    if min(map(len, lines)) < MIN_KEY_CHARACTERS:
        raise ApiKeysUnusable(f"{path}: a key must have at least {MIN_KEY_CHARACTERS} characters")
    return [line.encode() for line in lines]
