"""From a request's body to what the engine takes, all of it checked: the last door before it.

Pure but for the seed of requests that bring none. Runs in a thread beside the event loop, because
rendering, encoding and compiling grammars take their time.
Neighbours: `openai` reads bodies, `answer_form` says which grammar an answer must follow.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from moe_api.worker import ApiLimits
from moe_worker.api.answer_form import AnswerForm, answer_form
from moe_worker.api.api_error import ApiError, invalid, model_not_found
from moe_worker.api.openai import ChatRequest, CompletionRequest, GenerationRequest, parse
from moe_worker.api.served_model import ServedModel
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.text.chat_template import TemplateRefuses

MAX_PROMPT_LOGITS = 64 * 1024 * 1024
"""Prompt tokens times vocabulary, for requests that want the probabilities of their prompt: their
logits are held in memory at the same time, 256 MiB of them."""


@dataclass(frozen=True)
class Choice:
    """One sequence to generate."""

    prompt_ids: list[int]
    params: SamplingParams
    place: int = 0
    """0 for the first choice of each prompt."""


@dataclass(frozen=True)
class Prepared:
    """One request, ready for the engine."""

    choices: tuple[Choice, ...]
    stops: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    echo: bool = False
    continues: bool = False
    """The answer goes on from the prompt's text, rather than beginning a text of its own."""
    finds_calls: bool = False
    """The answer may hold tool calls."""

    @property
    def tells_logprobs(self) -> bool:
        return self.choices[0].params.num_logprobs is not None

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it gets."""
        return sum(len(choice.prompt_ids) for choice in self.choices if not choice.place)


def prepare_chat(
    body: bytes, model: ServedModel, limits: ApiLimits, max_model_len: int
) -> Prepared:
    """Check a chat request; prompt and answer together take at most `max_model_len` tokens.

    Raises:
        ApiError: 400 or 404 naming the field at fault.
    """
    request = parse(ChatRequest, body, limits)
    _check_model(request, model)
    if model.template is None:
        raise invalid(
            f"The model {model.name!r} has no chat template; use /v1/completions",
            param="messages",
            code="no_chat_template",
        )
    form = answer_form(request, model)
    text = "".join(message.text for message in request.messages)
    _refuse_hopeless(text, model, max_model_len, "messages")
    try:
        rendered = model.template.render(
            [message.for_template() for message in request.messages],
            model.tokenizer.shield,
            None if form.tools is None else [tool.for_template() for tool in form.tools],
        )
    except TemplateRefuses as error:
        raise invalid(f"messages: {error}", param="messages") from error
    prompt_ids = model.tokenizer.encode_rendered(rendered)
    return _prepared(request, [prompt_ids], form, model, max_model_len, "messages")


def prepare_completion(
    body: bytes, model: ServedModel, limits: ApiLimits, max_model_len: int
) -> Prepared:
    """As `prepare_chat`, for raw prompts of text or token ids."""
    request = parse(CompletionRequest, body, limits)
    _check_model(request, model)
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            _refuse_hopeless(prompt, model, max_model_len, "prompt")
            prompts.append(model.tokenizer.encode_prompt(prompt))
        else:
            prompts.append(prompt)
    prepared = _prepared(request, prompts, AnswerForm(), model, max_model_len, "prompt")
    return replace(prepared, echo=bool(request.echo), continues=True)


def _prepared(
    request: GenerationRequest,
    prompts: list[list[int]],
    form: AnswerForm,
    model: ServedModel,
    max_model_len: int,
    param: str,
) -> Prepared:
    choices = []
    for prompt_ids in prompts:
        max_tokens = _max_tokens(request, len(prompt_ids), max_model_len, param)
        _check_vocabulary(prompt_ids, model.vocab_size, param)
        params = _sampling(request, max_tokens, model)
        if params.prompt_logprobs is not None:
            _check_prompt_logits(len(prompt_ids), model.vocab_size)
        for place in range(request.n or 1):
            own = replace(
                params,
                seed=(params.seed + place) % 2**63,
                grammar=None if form.grammar is None else form.grammar.begin(),
            )
            choices.append(Choice(prompt_ids, own, place))
    return Prepared(
        choices=tuple(choices),
        stops=tuple(request.stop or ()),
        stream=bool(request.stream),
        include_usage=request.include_usage,
        finds_calls=form.tools is not None,
    )


def _sampling(request: GenerationRequest, max_tokens: int, model: ServedModel) -> SamplingParams:
    echoes = isinstance(request, CompletionRequest) and bool(request.echo)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, request.top_k or 0),
        top_p=_or(request.top_p, 1.0),
        min_p=_or(request.min_p, 0.0),
        seed=random.getrandbits(63) if request.seed is None else request.seed % 2**63,
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(request, model.vocab_size),
        num_logprobs=request.num_logprobs,
        prompt_logprobs=request.num_logprobs if echoes else None,
        stop_token_ids=frozenset() if request.ignore_eos else model.stop_token_ids,
        cache_salt=request.cache_salt or "",
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    biases = dict(request.logit_bias or {})
    unknown = [token for token in biases if token >= vocab_size]
    if unknown:
        raise invalid(
            f"logit_bias: the token id {unknown[0]} is not in the vocabulary of "
            f"{vocab_size} tokens",
            param="logit_bias",
            code="unknown_token",
        )
    return biases


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


def _check_prompt_logits(num_prompt_tokens: int, vocab_size: int) -> None:
    most = MAX_PROMPT_LOGITS // vocab_size
    if num_prompt_tokens > most:
        raise invalid(
            f"echo: with logprobs a prompt may have {most} tokens, this one has "
            f"{num_prompt_tokens}; leave out echo or logprobs",
            param="echo",
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
