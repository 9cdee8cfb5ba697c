"""One completion route, from the first byte of a request to the last of its answer.

`server` makes two, for text and for chat: they differ in how a body is prepared and how an answer
is shaped. What a client sends reaches the engine only after `prepare` made checked numbers of it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from moe_api.worker import ApiLimits
from moe_worker.api.api_error import ApiError, internal, invalid, queue_full, unavailable
from moe_worker.api.body import BodyReader
from moe_worker.api.client_presence import unless_gone
from moe_worker.api.generation import Generation
from moe_worker.api.pieces import End, Piece, pieces
from moe_worker.api.prepare import Prepared, ServedModel
from moe_worker.api.replies import DONE, Reply, Usage, to_event, to_json
from moe_worker.api.traffic import Traffic
from moe_worker.engine.events import NotAdmitting
from moe_worker.engine.scheduler import QueueFull, RequestTooLong
from moe_worker.metrics import Outcome, WorkerMetrics
from moe_worker.serving_engine import ServingEngine
from moe_worker.text.detokenizer import Detokenizer
from moe_worker.text.stop_strings import StopStrings

logger = logging.getLogger(__name__)

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True)
class Desk:
    """What all completion routes of one worker share."""

    engine: ServingEngine
    model: ServedModel | None
    """None when the model can not be served; the engine never admits then."""
    limits: ApiLimits
    traffic: Traffic
    metrics: WorkerMetrics
    bodies: BodyReader
    tokenizer_thread: Executor
    """One thread: encoding goes on beside the event loop, one prompt at a time."""


@dataclass(frozen=True)
class RouteKind:
    id_prefix: str
    prepare: Callable[[bytes, ServedModel, ApiLimits, int], Prepared]
    reply: Callable[[str, int, str, bool], Reply]
    """(request id, created, model name, whether usage is streamed) → shape of the answers."""


class CompletionRoute:
    """An ASGI application, because answering and noticing that the client left go together."""

    def __init__(self, desk: Desk, kind: RouteKind) -> None:
        self._desk = desk
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"{self._kind.id_prefix}-{uuid.uuid4().hex}"
        with self._desk.traffic.request():
            answer = _Answer(self._desk, self._kind, request_id, send)
            outcome: Outcome = "error"
            try:
                outcome = await answer.give(Request(scope, receive))
            except ApiError as error:
                outcome = _outcome(error)
                raise
            except ClientDisconnect:
                outcome = "cancelled"
                raise
            finally:
                self._desk.metrics.answered(outcome)
                answer.log(outcome)


class _Answer:
    """One request being answered."""

    def __init__(self, desk: Desk, kind: RouteKind, request_id: str, send: Send) -> None:
        self._desk = desk
        self._kind = kind
        self._request_id = request_id
        self._send = send
        self._start_seconds = time.monotonic()
        self._num_prompt_tokens = 0
        self._num_tokens = 0

    async def give(self, request: Request) -> Outcome:
        """Raises ApiError as long as nothing was sent; later errors end the stream."""
        model, prepared = await self._prepare(request)
        generation = Generation(self._desk.engine, self._request_id, prepared.params.max_tokens)
        with self._desk.traffic.generating(generation):
            self._submit(generation, prepared)
            completion = pieces(
                generation,
                Detokenizer(model.tokenizer.decoder),
                StopStrings(prepared.stops),
                self._desk.metrics.timer(self._start_seconds).token,
            )
            reply = self._kind.reply(
                self._request_id, int(time.time()), model.name, prepared.include_usage
            )
            answering = (
                self._stream(completion, reply, prepared)
                if prepared.stream
                else self._whole(completion, reply)
            )
            return await unless_gone(request.receive, answering) or "cancelled"

    def log(self, outcome: Outcome) -> None:
        logger.info(
            "request ended: %s, %d prompt tokens, %d tokens generated, %.3f s",
            outcome,
            self._num_prompt_tokens,
            self._num_tokens,
            time.monotonic() - self._start_seconds,
            extra={"request_id": self._request_id, "reason": outcome},
        )

    def _admit(self) -> ServedModel:
        """Refuse before work is spent on a body that could not be served anyway."""
        if self._desk.traffic.draining:
            raise unavailable("it is draining", retry_after_seconds=1)
        if not self._desk.engine.admitting or self._desk.model is None:
            phase = self._desk.engine.state().phase
            raise unavailable(f"its phase is {phase}", retry_after_seconds=5)
        return self._desk.model

    async def _prepare(self, request: Request) -> tuple[ServedModel, Prepared]:
        # The body is read even for a refusal: that closes the connection, and closing one with
        # unread bytes in it resets it before the client has read the answer.
        async with self._desk.bodies.read(request) as body:
            model = self._admit()
            prepare = functools.partial(
                self._kind.prepare, body, model, self._desk.limits, self._desk.engine.max_model_len
            )
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(self._desk.tokenizer_thread, prepare)
        self._num_prompt_tokens = len(prepared.prompt_ids)
        return model, prepared

    def _submit(self, generation: Generation, prepared: Prepared) -> None:
        try:
            generation.submit(prepared.prompt_ids, prepared.params)
        except QueueFull as error:
            raise queue_full(error.retry_after_seconds) from error
        except NotAdmitting as error:
            raise unavailable(str(error), error.retry_after_seconds) from error
        except RequestTooLong as error:
            raise invalid(str(error), code="context_length_exceeded") from error

    async def _whole(self, completion: AsyncGenerator[Piece | End, None], reply: Reply) -> Outcome:
        texts = []
        async with aclosing(completion) as items:
            async for item in items:
                match item:
                    case Piece(text=text):
                        texts.append(text)
                    case End() as end:
                        self._num_tokens = end.completion_tokens
        body = to_json(reply.whole("".join(texts), end.reason, self._usage()))
        await self._begin(JSON, [(b"content-length", str(len(body)).encode())])
        await self._send({"type": "http.response.body", "body": body})
        return end.reason

    async def _stream(
        self, completion: AsyncGenerator[Piece | End, None], reply: Reply, prepared: Prepared
    ) -> Outcome:
        await self._begin(EVENT_STREAM, [(b"cache-control", b"no-cache")])
        outcome: Outcome
        try:
            async with aclosing(completion) as items:
                opening = reply.opening()
                if opening is not None:
                    await self._chunk(to_event(opening))
                async for item in items:
                    match item:
                        case Piece(text=text):
                            await self._chunk(to_event(reply.piece(text)))
                        case End() as end:
                            self._num_tokens = end.completion_tokens
                            await self._chunk(to_event(reply.ending(end.reason)))
                            outcome = end.reason
            if prepared.include_usage:
                await self._chunk(to_event(reply.usage(self._usage())))
            last = DONE
        except ApiError as error:
            outcome, last = _outcome(error), to_event(error.to_wire())
        except Exception:
            # The status is sent already: the client reads it in the stream, the log has the cause.
            logger.exception("a stream failed", extra={"request_id": self._request_id})
            outcome, last = "error", to_event(internal().to_wire())
        await self._send({"type": "http.response.body", "body": last, "more_body": False})
        return outcome

    def _usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, self._num_tokens)

    async def _begin(self, media_type: str, headers: list[tuple[bytes, bytes]]) -> None:
        common = [
            (b"content-type", media_type.encode()),
            (b"x-request-id", self._request_id.encode()),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": [*common, *headers]}
        await self._send(start)

    async def _chunk(self, event: bytes) -> None:
        await self._send({"type": "http.response.body", "body": event, "more_body": True})


def _outcome(error: ApiError) -> Outcome:
    if error.code == "request_cancelled":
        return "cancelled"
    if error.status in (429, 503) and error.code != "drain_deadline":
        return "rejected"
    return "error" if error.status >= 500 else "invalid"
