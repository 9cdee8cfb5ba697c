"""One answer: all choices of a request, generated side by side and sent as a whole or as a stream.

Neighbours: `completion_route` makes it, `pieces` gives the text of a choice, `choices` joins them,
`chat_choice` and `text_choice` shape them, `replies` wraps them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from starlette.types import Message, Send

from moe_worker.api.api_error import ApiError, internal, invalid, queue_full, unavailable
from moe_worker.api.chat_choice import ChatChoice
from moe_worker.api.choices import merged
from moe_worker.api.generation import Generation
from moe_worker.api.pieces import End, Item, Piece, echoed, pieces
from moe_worker.api.prepare import Choice, Prepared
from moe_worker.api.replies import DONE, Envelope, Usage, to_event, to_json
from moe_worker.api.served_model import ServedModel
from moe_worker.api.text_choice import TextChoice
from moe_worker.api.traffic import Traffic
from moe_worker.engine.events import NotAdmitting, Prompt
from moe_worker.engine.scheduler import QueueFull, RequestTooLong
from moe_worker.metrics import Outcome, WorkerMetrics
from moe_worker.serving_engine import ServingEngine
from moe_worker.text.detokenizer import Detokenizer
from moe_worker.text.stop_strings import StopStrings

logger = logging.getLogger(__name__)

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"
SEND_SECONDS = 60.0
"""A client that takes nothing for so long has left."""


class ClientStalled(Exception):
    """The client does not take what is sent to it."""


@dataclass(frozen=True)
class Desk:
    """What all completion routes of one worker share."""

    engine: ServingEngine
    model: ServedModel | None
    """None when the model can not be served; the engine never admits then."""
    traffic: Traffic
    metrics: WorkerMetrics


class Answer:
    def __init__(
        self,
        desk: Desk,
        model: ServedModel,
        prepared: Prepared,
        envelope: Envelope,
        choices: Sequence[ChatChoice | TextChoice],
        started_seconds: float,
        send: Send,
    ) -> None:
        self._desk, self._model, self._prepared = desk, model, prepared
        self._envelope, self._choices = envelope, choices
        self._started_seconds = started_seconds
        self._send = send
        self._num_cached = 0
        self._reasons: dict[int, str] = {}
        self.num_tokens = 0
        """Generated for all choices."""

    async def give(self) -> Outcome:
        """Raises ApiError as long as nothing was sent; later errors end the stream."""
        engine, request_id = self._desk.engine, self._envelope.request_id
        wanted = self._prepared.choices
        generations = [
            Generation(engine, f"{request_id}/{index}" if len(wanted) > 1 else request_id, choice)
            for index, choice in enumerate(wanted)
        ]
        with self._desk.traffic.generating(request_id, generations):
            for generation in generations:
                _submit(generation)
            pairs = zip(generations, wanted, strict=True)
            items = merged([self._items(generation, choice) for generation, choice in pairs])
            failed = await (self._stream(items) if self._prepared.stream else self._whole(items))
        return failed or ("length" if "length" in self._reasons.values() else "stop")

    async def _items(self, generation: Generation, choice: Choice) -> AsyncGenerator[Item, None]:
        """One choice, with its prompt before it where that is wanted."""
        decoder = self._model.tokenizer.decoder
        before = choice.prompt_ids if self._prepared.continues else ()
        echo: Piece | None = None
        told = choice.params.prompt_logprobs is not None
        if self._prepared.echo:
            echo = echoed(choice.prompt_ids, None, decoder)
        completion = pieces(
            generation,
            Detokenizer(decoder, before),
            StopStrings(self._prepared.stops),
            self._desk.metrics.timer(self._started_seconds).token,
            offset=0 if echo is None else len(echo.text),
        )
        async with aclosing(completion) as items:
            async for item in items:
                yield item
                if isinstance(item, Prompt) and echo is not None:
                    prompt = choice.prompt_ids
                    yield echoed(prompt, item.logprobs, decoder) if told else echo

    async def _whole(self, items: AsyncGenerator[tuple[int, Item], None]) -> None:
        async with aclosing(items) as merged_items:
            async for index, item in merged_items:
                self._take(index, item)
        wholes = [choice.whole() for choice in self._choices]
        reasons = [self._reasons[index] for index in range(len(wholes))]
        body = to_json(self._envelope.whole(wholes, reasons, self._usage()))
        await self._begin(JSON, [(b"content-length", str(len(body)).encode())])
        await self._put({"type": "http.response.body", "body": body})

    async def _stream(self, items: AsyncGenerator[tuple[int, Item], None]) -> Outcome | None:
        """How it failed, once the status is sent: the client reads that in the stream."""
        await self._begin(EVENT_STREAM, [(b"cache-control", b"no-cache")])
        envelope = self._envelope
        try:
            async with aclosing(items) as merged_items:
                for index, choice in enumerate(self._choices):
                    for part in choice.opening():
                        await self._event(envelope.chunk(index, part, None))
                async for index, item in merged_items:
                    for part in self._take(index, item):
                        await self._event(envelope.chunk(index, part, None))
                    if index in self._reasons:
                        ending = self._choices[index].ending()
                        await self._event(envelope.chunk(index, ending, self._reasons[index]))
            if self._prepared.include_usage:
                await self._event(envelope.usage(self._usage()))
        except ApiError as error:
            await self._put_last(to_event(error.to_wire()))
            return outcome_of(error)
        except ClientStalled:
            raise
        except Exception:
            # The log has the cause.
            logger.exception("a stream failed", extra={"request_id": envelope.request_id})
            await self._put_last(to_event(internal().to_wire()))
            return "error"
        await self._put_last(DONE)
        return None

    def _take(self, index: int, item: Item) -> list[dict[str, object]]:
        """The chunks that an item of choice `index` comes to."""
        match item:
            case Prompt(cached_tokens=cached):
                if not self._prepared.choices[index].place:
                    self._num_cached += cached
                return []
            case Piece():
                return self._choices[index].take(item)
            case End(reason=reason, completion_tokens=num_tokens):
                self.num_tokens += num_tokens
                parts, self._reasons[index] = self._choices[index].end(reason)
                return parts

    def _usage(self) -> Usage:
        return Usage(self._prepared.num_prompt_tokens, self.num_tokens, self._num_cached)

    async def _begin(self, media_type: str, headers: list[tuple[bytes, bytes]]) -> None:
        common = [
            (b"content-type", media_type.encode()),
            (b"x-request-id", self._envelope.request_id.encode()),
        ]
        start = {"type": "http.response.start", "status": 200, "headers": [*common, *headers]}
        await self._put(start)

    async def _event(self, answer: dict[str, object]) -> None:
        await self._put({"type": "http.response.body", "body": to_event(answer), "more_body": True})

    async def _put_last(self, body: bytes) -> None:
        await self._put({"type": "http.response.body", "body": body, "more_body": False})

    async def _put(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                await self._send(message)
        except TimeoutError as error:
            raise ClientStalled from error


def outcome_of(error: ApiError) -> Outcome:
    """What a refusal or a failure counts as."""
    if error.code == "request_cancelled":
        return "cancelled"
    if error.status in (429, 503) and error.code != "drain_deadline":
        return "rejected"
    return "error" if error.status >= 500 else "invalid"


def _submit(generation: Generation) -> None:
    try:
        generation.submit()
    except QueueFull as error:
        raise queue_full(error.retry_after_seconds) from error
    except NotAdmitting as error:
        raise unavailable(str(error), error.retry_after_seconds) from error
    except RequestTooLong as error:
        raise invalid(str(error), code="context_length_exceeded") from error
