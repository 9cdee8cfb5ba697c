"""What a client did wrong, or what this worker can not do now, in OpenAI's error shape.

Raised by everything between the socket and the engine; `server` turns it into one JSON answer, or
into the error chunk of a stream that has begun.
"""

from __future__ import annotations

from typing import Any

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


class ApiError(Exception):
    """An answer other than 200.

    Args:
        status: HTTP status.
        message: field, value and way out, in one or two sentences.
        kind: OpenAI's `type`.
        param: the request field at fault, as the client spelled it.
        code: machine-readable cause.
        retry_after_seconds: when to try again; sent as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_seconds = retry_after_seconds

    def to_wire(self) -> dict[str, Any]:
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """A refusal to admit also asks the client to connect anew: perhaps to another worker."""
        if self.retry_after_seconds is None:
            return {}
        retry_after = {"Retry-After": str(max(1, self.retry_after_seconds))}
        return {**retry_after, "Connection": "close"} if self.status == 503 else retry_after


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong: sending it again will not help."""
    return ApiError(400, message, param=param, code=code)


def body_too_large(limit_bytes: int) -> ApiError:
    message = f"The body is larger than {limit_bytes} bytes, the limit of this server."
    return ApiError(413, message, code="body_too_large")


def model_not_found(name: str, served: str) -> ApiError:
    message = f"The model {name[:100]!r} does not exist here; this server has {served!r}."
    return ApiError(404, message, param="model", code="model_not_found")


def queue_full(retry_after_seconds: float) -> ApiError:
    return ApiError(
        429,
        "The queue of this worker is full. Try again later.",
        kind="rate_limit_error",
        code="queue_full",
        retry_after_seconds=round(retry_after_seconds),
    )


def unavailable(reason: str, retry_after_seconds: float) -> ApiError:
    return ApiError(
        503,
        f"This worker takes no requests now: {reason}. Try again later.",
        kind=SERVER_ERROR,
        code="unavailable",
        retry_after_seconds=round(retry_after_seconds),
    )


def draining_deadline() -> ApiError:
    """Ends a request that was still running when a drain's time was over."""
    return ApiError(
        503,
        "This worker is stopping and its drain time is over. Send the request again.",
        kind=SERVER_ERROR,
        code="drain_deadline",
        retry_after_seconds=1,
    )


def cancelled() -> ApiError:
    """Told to the reader of a request that somebody else cancelled."""
    return ApiError(409, "The request was cancelled.", code="request_cancelled")


def engine_failed(reason: str | None) -> ApiError:
    message = f"The engine could not finish the request: {reason or 'unknown cause'}."
    return ApiError(500, message, kind=SERVER_ERROR, code="engine_failed")


def internal() -> ApiError:
    """Says nothing about the cause: that is in the log, under the request's id."""
    return ApiError(500, "The server failed; its log says why.", kind=SERVER_ERROR)
