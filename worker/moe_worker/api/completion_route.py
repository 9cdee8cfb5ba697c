"""One completion route, from the first byte of a request to the last of its answer.

`server` makes two, for text and for chat: they differ in how a body is prepared and how a choice is
shaped. What a client sends reaches the engine only after `prepare` made checked numbers of it.
Neighbour: `answer` generates and sends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from moe_api.worker import ApiLimits
from moe_worker.api.answer import Answer, ClientStalled, Desk, outcome_of
from moe_worker.api.api_error import ApiError, unavailable
from moe_worker.api.body import BodyReader
from moe_worker.api.chat_choice import ChatChoice
from moe_worker.api.client_presence import unless_gone
from moe_worker.api.prepare import Prepared
from moe_worker.api.replies import Envelope, Kind
from moe_worker.api.served_model import ServedModel
from moe_worker.api.text_choice import TextChoice
from moe_worker.metrics import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Counter:
    """Where bodies are taken in; all routes of a worker share it."""

    limits: ApiLimits
    bodies: BodyReader
    tokenizer_thread: Executor
    """One thread: encoding goes on beside the event loop, one request at a time."""


@dataclass(frozen=True)
class RouteKind:
    id_prefix: str
    objects: Kind
    prepare: Callable[[bytes, ServedModel, ApiLimits, int], Prepared]
    choice: Callable[[ServedModel, Prepared], ChatChoice | TextChoice]


class CompletionRoute:
    """An ASGI application, because answering and noticing that the client left go together."""

    def __init__(self, desk: Desk, counter: Counter, kind: RouteKind) -> None:
        self._desk = desk
        self._counter = counter
        self._kind = kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = f"{self._kind.id_prefix}-{uuid.uuid4().hex}"
        started = time.monotonic()
        with self._desk.traffic.request():
            outcome: Outcome = "error"
            tokens = (0, 0)
            try:
                model, prepared = await self._take_in(Request(scope, receive))
                answer = self._answer(request_id, started, model, prepared, send)
                try:
                    outcome = await unless_gone(receive, answer.give()) or "cancelled"
                finally:
                    tokens = prepared.num_prompt_tokens, answer.num_tokens
            except ApiError as error:
                outcome = outcome_of(error)
                raise
            except ClientDisconnect:
                outcome = "cancelled"
                raise
            except ClientStalled:
                outcome = "cancelled"
            finally:
                self._desk.metrics.answered(outcome)
                _log(request_id, outcome, tokens, time.monotonic() - started)

    async def _take_in(self, request: Request) -> tuple[ServedModel, Prepared]:
        # The body is read even for a refusal: that closes the connection, and closing one with
        # unread bytes in it resets it before the client has read the answer.
        async with self._counter.bodies.read(request) as body:
            model = self._admit()
            prepare = functools.partial(
                self._kind.prepare,
                body,
                model,
                self._counter.limits,
                self._desk.engine.max_model_len,
            )
            loop = asyncio.get_running_loop()
            return model, await loop.run_in_executor(self._counter.tokenizer_thread, prepare)

    def _admit(self) -> ServedModel:
        """Refuse before work is spent on a body that could not be served anyway."""
        if self._desk.traffic.draining:
            raise unavailable("it is draining", retry_after_seconds=1)
        if not self._desk.engine.admitting or self._desk.model is None:
            phase = self._desk.engine.state().phase
            raise unavailable(f"its phase is {phase}", retry_after_seconds=5)
        return self._desk.model

    def _answer(
        self,
        request_id: str,
        started_seconds: float,
        model: ServedModel,
        prepared: Prepared,
        send: Send,
    ) -> Answer:
        envelope = Envelope(
            kind=self._kind.objects,
            request_id=request_id,
            created=int(time.time()),
            model=model.name,
            reports_usage=prepared.include_usage,
        )
        choices = [self._kind.choice(model, prepared) for _ in prepared.choices]
        return Answer(self._desk, model, prepared, envelope, choices, started_seconds, send)


def _log(request_id: str, outcome: Outcome, tokens: tuple[int, int], seconds: float) -> None:
    logger.info(
        "request ended: %s, %d prompt tokens, %d tokens generated, %.3f s",
        outcome,
        *tokens,
        seconds,
        extra={"request_id": request_id, "reason": outcome},
    )
