"""How a request fails: what the network or the server did, as an outcome and a line for people.

Neighbours: `exchange` and `client` raise and catch it.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator

import httpx

from moe_worker.bench.record import Outcome
from moe_worker.bench.streamed_answer import error_message

MAX_REFUSAL_BYTES = 64 * 2**10
MAX_DETAIL_CHARACTERS = 200


class Failure(Exception):
    """A request ended, and not well. `retry_after_seconds`: the server said when to come again."""

    def __init__(
        self, outcome: Outcome, detail: str, retry_after_seconds: float | None = None
    ) -> None:
        detail = " ".join(detail.split())[:MAX_DETAIL_CHARACTERS]
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds


def broken(error: httpx.HTTPError) -> Failure:
    """What went wrong below an answer."""
    detail = str(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError):
        return Failure(Outcome.UNREACHABLE, detail)
    if isinstance(error, httpx.DecodingError):
        return Failure(Outcome.MALFORMED, detail)
    return Failure(Outcome.CUT_OFF, detail)


async def refusal(response: httpx.Response) -> Failure:
    """Of an answer other than 200, whose body is still to be read."""
    body = await beginning(response.aiter_bytes(), MAX_REFUSAL_BYTES)
    return refused(response.status_code, response.headers.get("Retry-After"), body)


def refused(status: int, retry_after: str | None, body: bytes) -> Failure:
    """Retry-After counts only where it means "the same again, later"."""
    try:
        message = error_message(json.loads(body))
    except (ValueError, RecursionError):
        message = None
    detail = f"{status}: {message or body.decode(errors='replace')}"
    later = parse_retry_after(retry_after)
    if status == 429:
        return Failure(Outcome.REFUSED, detail, later)
    if status >= 500:
        return Failure(Outcome.SERVER_ERROR, detail, later if status == 503 else None)
    return Failure(Outcome.CLIENT_ERROR, detail)


def parse_retry_after(text: str | None) -> float | None:
    """Seconds; None = not told, or told as a date."""
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


async def beginning(chunks: AsyncIterator[bytes], most_bytes: int) -> bytes:
    """The first bytes of a body."""
    body = b""
    async for chunk in chunks:
        body += chunk
        if len(body) >= most_bytes:
            break
    return body[:most_bytes]
