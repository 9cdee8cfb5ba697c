"""One request on the network, from when it is due to the last byte, and how it ended.

Every failure is a fact about the server and becomes a Record. Neighbours: `streamed_answer` reads
the events, `drive` decides when, `client` has the connections.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from moe_worker.bench.failure import Failure, broken, refusal
from moe_worker.bench.record import Outcome, Record
from moe_worker.bench.sse import EventParser, NotEvents
from moe_worker.bench.streamed_answer import NotACompletion, StreamedAnswer, StreamFailed

MAX_ANSWER_BYTES = 256 * 2**20
TAIL_SECONDS = 1.0
"""After the server's last word, for the end of the body: only then is the connection used again."""
EVENT_STREAM = "text/event-stream"


@dataclass(frozen=True)
class Limits:
    timeout_seconds: float
    """From when a request is due to its end."""
    max_retries: int
    """Of a request that was refused with Retry-After."""
    connections: int


class Exchange:
    """Used once. Times are those of the event loop."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        limits: Limits,
        due_seconds: float,
        now: Callable[[], float],
    ) -> None:
        self._http = http
        self._limits = limits
        self._due_seconds = due_seconds
        self._now = now
        self._sent_seconds: float | None = None
        self._done_seconds: float | None = None
        self._retries = 0
        self._answer = StreamedAnswer()

    async def run(self, url: str, body: bytes) -> Record:
        """Send and read to the end."""
        deadline_seconds = self._due_seconds + self._limits.timeout_seconds
        try:
            async with asyncio.timeout_at(deadline_seconds) as deadline:
                await self._until_taken(url, body, deadline)
        except TimeoutError:
            if self._answer.is_done:
                return self._record(Outcome.OK)
            return self._record(Outcome.TIMED_OUT, self._timeout_detail())
        except Failure as failure:
            return self._record(failure.outcome, failure.detail)
        return self._record(Outcome.OK)

    async def _until_taken(self, url: str, body: bytes, deadline: asyncio.Timeout) -> None:
        """Come again as long as the server says when, and there is time for it."""
        await asyncio.sleep(0)  # a deadline that has passed ends it here, unsent
        self._sent_seconds = self._now()
        while True:
            try:
                return await self._once(url, body, deadline)
            except Failure as failure:
                later, end = failure.retry_after_seconds, deadline.when()
                assert end is not None, "every exchange has a deadline"
                is_last = self._retries == self._limits.max_retries
                if later is None or is_last or self._now() + later >= end:
                    raise
            self._retries += 1
            await asyncio.sleep(later)

    async def _once(self, url: str, body: bytes, deadline: asyncio.Timeout) -> None:
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.stream("POST", url, content=body, headers=headers) as response:
                if response.status_code != 200:
                    raise await refusal(response)
                await self._read(response, deadline)
        except httpx.HTTPError as error:
            # Nothing can be missing after the last word.
            if not self._answer.is_done:
                raise broken(error) from error
        if not self._answer.is_whole:
            raise Failure(Outcome.CUT_OFF, "the stream ended before the answer did")

    async def _read(self, response: httpx.Response, deadline: asyncio.Timeout) -> None:
        kind = response.headers.get("Content-Type", "no content type")
        if not kind.lower().startswith(EVENT_STREAM):
            raise Failure(Outcome.MALFORMED, f"200 with {kind} instead of {EVENT_STREAM}")
        parser, num_bytes = EventParser(), 0
        async for received in response.aiter_bytes():
            seconds = self._now()
            num_bytes += len(received)
            if num_bytes > MAX_ANSWER_BYTES:
                raise Failure(Outcome.MALFORMED, f"more than {MAX_ANSWER_BYTES} bytes")
            self._take(parser, received, seconds)
            if self._answer.is_done and self._done_seconds is None:
                self._done_seconds = seconds
                deadline.reschedule(seconds + TAIL_SECONDS)

    def _take(self, parser: EventParser, received: bytes, seconds: float) -> None:
        try:
            for data in parser.push(received):
                self._answer.take(data, seconds)
        except (NotEvents, NotACompletion) as error:
            raise Failure(Outcome.MALFORMED, str(error)) from error
        except StreamFailed as error:
            raise Failure(Outcome.SERVER_ERROR, f"in the stream: {error}") from error

    def _timeout_detail(self) -> str:
        limit = f"no end within {self._limits.timeout_seconds:g} s"
        if self._sent_seconds is None:
            return f"{limit}: no connection was free"
        pieces = len(self._answer.text_seconds)
        return f"{limit}, after {pieces} pieces of text" if pieces else f"{limit}, without text"

    def _record(self, outcome: Outcome, detail: str = "") -> Record:
        now = self._now()
        return Record(
            outcome=outcome,
            due_seconds=self._due_seconds,
            sent_seconds=self._sent_seconds,
            text_seconds=self._answer.text_seconds,
            end_seconds=now if self._done_seconds is None else self._done_seconds,
            tokens=self._answer.tokens,
            retries=self._retries,
            detail=detail,
        )


def to_body(fields: object) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()
