"""From a request's body to what the engine takes, all of it checked: the last door before it.

Pure but for the seed of requests that bring none. Runs in a thread beside the event loop, because
rendering and encoding take their time.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from moe_api.worker import ApiLimits
from moe_worker.api.api_error import ApiError, invalid, model_not_found
from moe_worker.api.openai import ChatRequest, CompletionRequest, GenerationRequest, parse
from moe_worker.engine.sequence import SamplingParams
from moe_worker.text.chat_template import ChatTemplate
from moe_worker.text.prompt_tokenizer import PromptTokenizer


@dataclass(frozen=True)
class ServedModel:
    """What of the model the public API needs."""

    name: str
    tokenizer: PromptTokenizer
    template: ChatTemplate | None
    vocab_size: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True)
class Prepared:
    """One request, ready for the engine."""

    prompt_ids: list[int]
    params: SamplingParams
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def prepare_chat(
    body: bytes, model: ServedModel, limits: ApiLimits, max_model_len: int
) -> Prepared:
    """Check a chat request; prompt and answer together take at most `max_model_len` tokens.

    Raises:
        ApiError: 400 or 404 naming the field at fault.
    """
    request = parse(ChatRequest, body, limits.max_stop_strings)
    _check_model(request, model)
    if model.template is None:
        raise invalid(
            f"The model {model.name!r} has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    text = "".join(message.content for message in request.messages)
    _refuse_hopeless(text, model, max_model_len, "messages")
    rendered = model.template.render(request.messages, model.tokenizer.shield)
    prompt_ids = model.tokenizer.encode_rendered(rendered)
    return _prepared(request, prompt_ids, model, max_model_len, "messages")


def prepare_completion(
    body: bytes, model: ServedModel, limits: ApiLimits, max_model_len: int
) -> Prepared:
    """As `prepare_chat`, for a raw prompt of text or token ids."""
    request = parse(CompletionRequest, body, limits.max_stop_strings)
    _check_model(request, model)
    if isinstance(request.prompt, str):
        _refuse_hopeless(request.prompt, model, max_model_len, "prompt")
        prompt_ids = model.tokenizer.encode_prompt(request.prompt)
    else:
        prompt_ids = request.prompt
    return _prepared(request, prompt_ids, model, max_model_len, "prompt")


def _prepared(
    request: GenerationRequest,
    prompt_ids: list[int],
    model: ServedModel,
    max_model_len: int,
    param: str,
) -> Prepared:
    max_tokens = _max_tokens(request, len(prompt_ids), max_model_len, param)
    _check_vocabulary(prompt_ids, model.vocab_size, param)
    seed = random.getrandbits(63) if request.seed is None else request.seed % 2**63
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        seed=seed,
        stop_token_ids=model.stop_token_ids,
    )
    return Prepared(
        prompt_ids=prompt_ids,
        params=params,
        stops=tuple(request.stop or ()),
        stream=bool(request.stream),
        include_usage=request.include_usage,
    )


def _check_model(request: GenerationRequest, model: ServedModel) -> None:
    if request.model != model.name:
        raise model_not_found(request.model, model.name)


def _check_vocabulary(prompt_ids: list[int], vocab_size: int, param: str) -> None:
    """Also for ids from the tokenizer: it may know tokens for which the model has no embedding."""
    for position, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"{param}: the token id at position {position} is not in the vocabulary of "
                f"{vocab_size} tokens",
                param=param,
                code="unknown_token",
            )


def _refuse_hopeless(text: str, model: ServedModel, max_model_len: int, param: str) -> None:
    if not model.tokenizer.fits(text, max_model_len):
        raise _too_long(f"the text of {len(text)} characters is", max_model_len, param)


def _max_tokens(
    request: GenerationRequest, num_prompt_tokens: int, max_model_len: int, param: str
) -> int:
    """How many tokens to generate; what was asked for must fit behind the prompt."""
    if not num_prompt_tokens:
        raise invalid(f"{param}: is empty; the model needs at least one token", param=param)
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise _too_long(f"{num_prompt_tokens} tokens are", max_model_len, param)
    if request.asked_tokens is None:
        return min(request.default_tokens or room, room)
    if request.asked_tokens > room:
        raise invalid(
            f"max_tokens: {request.asked_tokens} do not fit: the prompt takes "
            f"{num_prompt_tokens} of {max_model_len} tokens, so at most {room} may follow",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return request.asked_tokens


def _too_long(what: str, max_model_len: int, param: str) -> ApiError:
    return invalid(
        f"{param}: {what} too long: the model takes {max_model_len} tokens, prompt and answer "
        "together",
        param=param,
        code="context_length_exceeded",
    )
