"""The control listener: plan, state, load, drain, and expert weights for peers.

Its own port, never part of the public API; every route needs the bearer token of the deployment's
control secret. Documents are those of `moe_api`; the engine decides what becomes of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from moe_api import names
from moe_api.document import Document, DocumentError
from moe_api.plan import Fence, GroupPlan, PlanError
from moe_api.worker import DrainRequest
from moe_worker.api.api_error import ApiError, invalid
from moe_worker.api.body import BodyReader
from moe_worker.api.error_answers import EXCEPTION_HANDLERS
from moe_worker.serving_engine import ServingEngine

MAX_CONTROL_BODY_BYTES = 4 * 1024 * 1024
"""Above the largest plan: objects of the API server end at about 1.5 MiB."""
CHUNK_BYTES = 256 * 1024
CHECKSUM_HEADER = "x-moe-checksum"

AnyDocument = TypeVar("AnyDocument", bound=Document)


def control_app(
    engine: ServingEngine, token: str, begin_drain: Callable[[float], None]
) -> Starlette:
    """The control API on `engine`; `begin_drain` is told the drain's deadline in seconds."""
    routes = Control(engine, begin_drain)
    return Starlette(
        routes=[
            Route(names.CONTROL_PLAN, routes.put_plan, methods=["PUT"]),
            Route(names.CONTROL_PLAN, routes.get_plan, methods=["GET"]),
            Route(names.CONTROL_STATE, routes.state, methods=["GET"]),
            Route(names.CONTROL_LOAD, routes.load, methods=["GET"]),
            Route(names.CONTROL_DRAIN, routes.drain, methods=["POST"]),
            Route(f"{names.CONTROL_EXPERT}/{{layer:int}}/{{slot:int}}", routes.expert),
        ],
        middleware=[Middleware(BearerToken, token=token)],
        exception_handlers=EXCEPTION_HANDLERS,
    )


class BearerToken:
    """Lets nothing through without the token, unknown routes included."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        if not token:
            raise ValueError("the control token is empty: anybody could send plans")
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allows(scope):
            refusal = ApiError(401, "The control API needs the bearer token of this deployment.")
            headers = {"WWW-Authenticate": "Bearer"}
            response = JSONResponse(refusal.to_wire(), refusal.status, headers)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


class Control:
    """The handlers; answers are documents, refusals have OpenAI's error shape."""

    def __init__(self, engine: ServingEngine, begin_drain: Callable[[float], None]) -> None:
        self._engine = engine
        self._begin_drain = begin_drain
        self._bodies = BodyReader(MAX_CONTROL_BODY_BYTES)

    async def put_plan(self, request: Request) -> Response:
        """202 taken or known already, 409 with the fence in force when it is older."""
        async with self._bodies.read(request) as body:
            plan = _document(GroupPlan, body)
        try:
            answer = self._engine.put_plan(plan)
        except PlanError as error:
            raise invalid(str(error)) from error
        return JSONResponse(_fence(answer.in_force), 409 if answer.refused else 202)

    async def get_plan(self, request: Request) -> Response:
        plan = self._engine.plan
        if plan is None:
            raise ApiError(404, "No plan is in force yet.", code="no_plan")
        return _json(plan.to_json())

    async def state(self, request: Request) -> Response:
        return _json(self._engine.state().to_json())

    async def load(self, request: Request) -> Response:
        return _json(self._engine.load().to_json())

    async def drain(self, request: Request) -> Response:
        """Begins a drain and answers at once with the state; GET state shows when it is done."""
        async with self._bodies.read(request) as body:
            wanted = _document(DrainRequest, body)
        self._begin_drain(wanted.deadline_seconds)
        return _json(self._engine.state().to_json(), 202)

    async def expert(self, request: Request) -> Response:
        """Bytes of a live slot with their SHA-256; 409 when it holds something else by now."""
        layer, slot = request.path_params["layer"], request.path_params["slot"]
        asked = {key: _number(request, key) for key in ("expert", "generation", "epoch")}
        read = self._engine.read_slot
        weights = await asyncio.to_thread(read, layer, slot, **asked)
        if weights is None:
            message = f"Layer {layer} slot {slot} does not hold that under that plan: {asked}."
            raise ApiError(409, message, code="not_held")
        checksum = await asyncio.to_thread(lambda: hashlib.sha256(weights).hexdigest())
        headers = {CHECKSUM_HEADER: checksum, "Content-Length": str(len(weights))}
        return StreamingResponse(
            _chunks(weights), headers=headers, media_type="application/octet-stream"
        )


async def _chunks(weights: bytes) -> AsyncIterator[memoryview]:
    """A peer that reads slowly holds one chunk in the socket, not the whole expert."""
    view = memoryview(weights)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def _document(kind: type[AnyDocument], body: bytes) -> AnyDocument:
    try:
        return kind.from_json(body)
    except DocumentError as error:
        raise invalid(str(error)) from error


def _number(request: Request, key: str) -> int:
    text = request.query_params.get(key, "")
    if not (text.isdecimal() and len(text) < 19):
        raise invalid(f"{key}: must be a whole number in the query, got {text[:40]!r}", param=key)
    return int(text)


def _fence(fence: Fence) -> dict[str, int]:
    return {
        "leaderEpoch": fence.leader_epoch,
        "generation": fence.generation,
        "epoch": fence.epoch,
    }


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")
