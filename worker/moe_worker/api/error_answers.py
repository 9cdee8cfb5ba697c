"""Turns every error of a listener into one JSON answer in OpenAI's shape, known routes or not."""

from __future__ import annotations

import http
import logging
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from moe_worker.api.api_error import ApiError, internal

logger = logging.getLogger(__name__)


async def answer_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.to_wire(), error.status, error.headers)


async def answer_http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses: unknown route, wrong method."""
    assert isinstance(error, HTTPException)
    phrase = http.HTTPStatus(error.status_code).phrase
    message = f"{phrase}: {request.method} {request.url.path[:100]}"
    headers = dict(error.headers or {})
    refusal = ApiError(error.status_code, message)
    return JSONResponse(refusal.to_wire(), refusal.status, headers)


async def answer_disconnect(request: Request, error: Exception) -> Response:
    """Nobody is there to read it; the status is what a log or a proxy would want to see."""
    return Response(status_code=499)


async def answer_failure(request: Request, error: Exception) -> Response:
    """A bug: the server logs it (it re-raises after this answer)."""
    refusal = internal()
    return JSONResponse(refusal.to_wire(), refusal.status)


EXCEPTION_HANDLERS: Mapping[Any, Any] = {
    ApiError: answer_api_error,
    HTTPException: answer_http_error,
    ClientDisconnect: answer_disconnect,
    Exception: answer_failure,
}
