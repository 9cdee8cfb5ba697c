"""What the public API reads: the bodies of completions and chat completions, checked at the door.

A field that this server does not honour is refused by name, never ignored. `prepare` turns a
checked body into token ids and sampling parameters; nothing else of a body travels further.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from moe_worker.api.api_error import ApiError, invalid

MAX_STOP_CHARACTERS = 1024
MOST_STOP_STRINGS = 64
"""Highest `spec.api.maxStopStrings`; a deployment's own limit is checked after parsing."""
MAX_SHOWN_CHARACTERS = 80
MAX_TOKENS = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chat goes on to the end of the context."""


def _one_prompt(value: Any) -> str | list[int]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in value):
        return value
    raise PydanticCustomError(
        "one_prompt", "must be one text, one list of token ids, or a list that holds one of these"
    )


def _stop_list(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_STOP_STRINGS:
        most = {"most": MOST_STOP_STRINGS}
        raise PydanticCustomError("too_many", "must be at most {most} strings", most)
    return [value] if isinstance(value, str) else value


def _joined_parts(value: Any) -> Any:
    """OpenAI's other spelling of a message: a list of parts of type text."""
    if not isinstance(value, list):
        return value
    texts = []
    for part in value:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"}):
            raise PydanticCustomError("part", "parts must be {{'type': 'text', 'text': …}}")
        if part["type"] != "text" or not isinstance(part["text"], str):
            raise PydanticCustomError("part", "this model reads parts of type text only")
        texts.append(part["text"])
    return "".join(texts)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class StreamOptions(_Body):
    include_usage: bool = False


class GenerationRequest(_Body):
    """What both routes share. Null is the same as absent, as in OpenAI's API."""

    model: str
    max_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    n: int | None = Field(default=None, ge=1, le=1)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    stop: Annotated[list[StopString] | None, BeforeValidator(_stop_list)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def asked_tokens(self) -> int | None:
        """Tokens to generate that the client asked for."""
        return self.max_tokens

    @property
    def default_tokens(self) -> int | None:
        """Tokens to generate when the client named no number, None = as many as fit."""
        return None


class CompletionRequest(GenerationRequest):
    prompt: Annotated[str | list[int], PlainValidator(_one_prompt)]

    @property
    def default_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS


class Message(_Body):
    role: Literal["system", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_joined_parts)]


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1, le=MAX_TOKENS)

    @property
    def asked_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse(kind: type[AnyRequest], body: bytes, max_stop_strings: int) -> AnyRequest:
    """Read and check one body.

    Raises:
        ApiError: 400 naming the first field at fault, its value and what is allowed.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], kind) from error
    if request.stop is not None and len(request.stop) > max_stop_strings:
        raise invalid(
            f"stop: {len(request.stop)} strings are more than {max_stop_strings}, "
            "the limit of this server",
            param="stop",
        )
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true", param="stream_options")
    if isinstance(request, ChatRequest):
        _refuse_two_limits(request)
    return request


def _refuse_two_limits(request: ChatRequest) -> None:
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid(
            f"max_tokens {both[0]} and max_completion_tokens {both[1]} mean the same: send one",
            param="max_tokens",
        )


def _refusal(error: ErrorDetails, kind: type[GenerationRequest]) -> ApiError:
    if error["type"] == "json_invalid":
        return invalid(f"The body is not JSON: {error['msg']}", code="invalid_json")
    if not error["loc"]:
        return invalid(f"The body must be a JSON object: {error['msg']}", code="invalid_json")
    path = _shown(".".join(str(part) for part in error["loc"]))
    param = _shown(str(error["loc"][0]))
    if error["type"] == "missing":
        return invalid(f"{path}: this field is required", param=param, code="missing_field")
    if error["type"] == "extra_forbidden":
        fields = ", ".join(sorted(kind.model_fields))
        message = f"{path}: this server does not take this field; it takes {fields}"
        return invalid(message, param=param, code="unknown_field")
    return invalid(f"{path}: {error['msg']}, got {_shown(repr(error['input']))}", param=param)


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
