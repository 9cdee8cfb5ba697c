"""What the public API reads: the bodies of completions and chat completions, checked at the door.

A field that this server does not honour is refused by name, never ignored. `prepare` turns a
checked body into token ids and sampling parameters; nothing else of a body travels further.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from moe_api.worker import ApiLimits
from moe_worker.api.api_error import ApiError, invalid
from moe_worker.api.fields import (
    Body,
    CacheSalt,
    LogitBias,
    Logprobs,
    MaxTokens,
    NumChoices,
    Penalty,
    Prompts,
    Seed,
    Stops,
    TopK,
    User,
)
from moe_worker.api.formats import NamedTool, ResponseFormat, ToolChoice, Tools
from moe_worker.api.messages import Message

MAX_SHOWN_CHARACTERS = 80
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default for completions; chat goes on to the end of the context."""


class StreamOptions(Body):
    include_usage: bool = False


class GenerationRequest(Body):
    """What both routes share. Null is the same as absent, as in OpenAI's API."""

    model: str
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: TopK | None = None
    """0 and -1 mean all, as in other servers."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    n: NumChoices | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    ignore_eos: bool | None = None
    """Go on to max_tokens, whatever the model says: for measurements."""
    cache_salt: CacheSalt | None = None
    """Only requests with the same one share cached prefixes."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: User | None = None
    """Clients name their users here; nothing is kept of it."""

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

    @property
    def num_choices(self) -> int:
        """Answers to generate."""
        return self.n or 1

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives to tell with each token; None = no probabilities at all."""
        return None


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Logprobs | None = None

    @property
    def default_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS

    @property
    def num_choices(self) -> int:
        return len(self.prompt) * (self.n or 1)

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs


class ChatRequest(GenerationRequest):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def asked_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)


def parse(kind: type[AnyRequest], body: bytes, limits: ApiLimits) -> AnyRequest:
    """Read and check one body.

    Raises:
        ApiError: 400 naming the first field at fault, its value and what is allowed.
    """
    try:
        request = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0], kind) from error
    _check_limits(request, limits)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream: true", param="stream_options")
    if isinstance(request, ChatRequest):
        _check_pairs(request)
    return request


def _check_limits(request: GenerationRequest, limits: ApiLimits) -> None:
    if request.stop is not None and len(request.stop) > limits.max_stop_strings:
        raise invalid(
            f"stop: {len(request.stop)} strings are more than {limits.max_stop_strings}, "
            "the limit of this server",
            param="stop",
        )
    if request.num_choices > limits.max_choices:
        raise invalid(
            f"n: {request.num_choices} answers to one request are more than {limits.max_choices}, "
            "the limit of this server (n times the number of prompts counts)",
            param="n" if (request.n or 1) > 1 else "prompt",
        )


def _check_pairs(request: ChatRequest) -> None:
    """Fields that mean something only beside others."""
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise invalid(
            f"max_tokens {both[0]} and max_completion_tokens {both[1]} mean the same: send one",
            param="max_tokens",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid("top_logprobs needs logprobs: true", param="top_logprobs")
    format_type = None if request.response_format is None else request.response_format.type
    if request.ignore_eos and (request.tools is not None or format_type not in (None, "text")):
        raise invalid("ignore_eos and an answer of a given form exclude each other", "ignore_eos")
    if request.tools is None:
        if request.tool_choice not in (None, "none"):
            raise invalid("tool_choice needs tools", param="tool_choice")
        if request.parallel_tool_calls is not None:
            raise invalid("parallel_tool_calls needs tools", param="parallel_tool_calls")
        return
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise invalid(f"tools: two are named {twice!r}", param="tools")
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(
            f"tool_choice: {choice.function.name!r} is not among the tools", param="tool_choice"
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
        return invalid(_unknown_field(path, error, kind), param=param, code="unknown_field")
    return invalid(f"{path}: {error['msg']}, got {_shown(repr(error['input']))}", param=param)


def _unknown_field(path: str, error: ErrorDetails, kind: type[GenerationRequest]) -> str:
    if len(error["loc"]) > 1:
        return f"{path}: this server does not take this field"
    fields = ", ".join(sorted(kind.model_fields))
    return f"{path}: this server does not take this field; it takes {fields}"


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"
