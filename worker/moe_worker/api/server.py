"""The public listener: OpenAI's routes, cancel, health, readiness, metrics. No control route."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moe_api.worker import ApiLimits
from moe_worker.api.answer import Desk
from moe_worker.api.api_error import ApiError, model_not_found
from moe_worker.api.api_key import ApiKeys, RequireKey
from moe_worker.api.body import BodyReader
from moe_worker.api.chat_choice import ChatChoice
from moe_worker.api.completion_route import CompletionRoute, Counter, RouteKind
from moe_worker.api.error_answers import EXCEPTION_HANDLERS
from moe_worker.api.openapi import openapi_document
from moe_worker.api.prepare import Prepared, prepare_chat, prepare_completion
from moe_worker.api.replies import CHAT, TEXT
from moe_worker.api.served_model import ServedModel
from moe_worker.api.text_choice import TextChoice
from moe_worker.api.traffic import Traffic
from moe_worker.metrics import WorkerMetrics
from moe_worker.serving_engine import ServingEngine
from moe_worker.text.tool_form import ToolCallFinder


def _chat_choice(model: ServedModel, prepared: Prepared) -> ChatChoice:
    finder = ToolCallFinder() if prepared.finds_calls else None
    return ChatChoice(model.texts, finder, prepared.tells_logprobs)


def _text_choice(model: ServedModel, prepared: Prepared) -> TextChoice:
    return TextChoice(model.texts, prepared.tells_logprobs)


CHAT_ROUTE = RouteKind("chatcmpl", CHAT, prepare_chat, _chat_choice)
TEXT_ROUTE = RouteKind("cmpl", TEXT, prepare_completion, _text_choice)


def public_app(
    engine: ServingEngine,
    model: ServedModel | None,
    limits: ApiLimits,
    traffic: Traffic,
    metrics: WorkerMetrics,
    tokenizer_thread: Executor,
    keys: ApiKeys | None = None,
) -> Starlette:
    """The public API of one worker. `model` None: it can not be served, every request gets 503.
    `keys` None: it is open to whoever reaches it."""
    desk = Desk(engine, model, traffic, metrics)
    counter = Counter(limits, BodyReader(limits.max_body_bytes), tokenizer_thread)
    chat = CompletionRoute(desk, counter, CHAT_ROUTE)
    text = CompletionRoute(desk, counter, TEXT_ROUTE)
    public = Public(desk)
    app = Starlette(
        routes=[
            Route("/v1/models", public.models),
            Route("/v1/models/{model:path}", public.model),
            Route("/v1/completions", text, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/requests/{request_id}", public.cancel, methods=["DELETE"]),
            Route("/openapi.json", public.openapi),
            Route("/healthz", public.healthz),
            Route("/readyz", public.readyz),
            Route("/metrics", public.metrics),
        ],
        middleware=[] if keys is None else [Middleware(RequireKey, keys=keys)],
        exception_handlers=EXCEPTION_HANDLERS,
    )
    app.router.redirect_slashes = False
    return app


class Public:
    """Handlers of the short routes."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._created = int(time.time())

    async def models(self, request: Request) -> Response:
        model = self._desk.model
        listed = [] if model is None else [self._described(model)]
        return JSONResponse({"object": "list", "data": listed})

    async def model(self, request: Request) -> Response:
        model, name = self._desk.model, request.path_params["model"]
        if model is None or model.name != name:
            raise model_not_found(name, "none" if model is None else model.name)
        return JSONResponse(self._described(model))

    async def cancel(self, request: Request) -> Response:
        """200 only when a request that was under way will end now."""
        request_id = request.path_params["request_id"]
        if not self._desk.traffic.cancel(request_id):
            message = f"No request {request_id[:80]!r} is under way here."
            raise ApiError(404, message, code="unknown_request")
        return JSONResponse({"id": request_id, "object": "request", "cancelled": True})

    async def openapi(self, request: Request) -> Response:
        """What this API takes and gives, for programs."""
        return JSONResponse(await asyncio.to_thread(openapi_document))

    async def healthz(self, request: Request) -> Response:
        """Does the engine's loop still turn, or rest on purpose?"""
        healthy = self._desk.engine.healthy
        return JSONResponse({"healthy": healthy}, 200 if healthy else 503)

    async def readyz(self, request: Request) -> Response:
        """Would a request be let in now?"""
        if self._desk.traffic.draining:
            return JSONResponse({"ready": False, "reason": "Draining"}, 503)
        if not self._desk.engine.admitting:
            state = self._desk.engine.state()
            body: dict[str, object] = {"ready": False, "reason": state.phase}
            if state.warm_up is not None:
                body["warmUp"] = state.warm_up.to_wire()
            return JSONResponse(body, 503)
        return JSONResponse({"ready": True})

    async def metrics(self, request: Request) -> Response:
        text = await asyncio.to_thread(generate_latest, self._desk.metrics.registry)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _described(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "moe-operator",
            "max_model_len": self._desk.engine.max_model_len,
        }
