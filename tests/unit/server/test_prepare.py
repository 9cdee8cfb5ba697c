"""What reaches the engine is in range, and what can not be served is refused before."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from moe_api.worker import ApiLimits
from moe_worker.api.api_error import ApiError
from moe_worker.api.prepare import Prepared, prepare_chat, prepare_completion
from moe_worker.api.served_model import ServedModel
from moe_worker.text.chat_template import ChatTemplate
from moe_worker.text.prompt_tokenizer import PromptTokenizer
from tests.support.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

MAX_MODEL_LEN = 64
MODEL = ServedModel(
    name="m",
    tokenizer=PromptTokenizer(byte_tokenizer()),
    template=ChatTemplate(CHAT_TEMPLATE, {}),
    vocab_size=263,
    stop_token_ids=frozenset({260}),
)


def completion(**fields: Any) -> Prepared:
    body = json.dumps({"model": "m", **fields}).encode()
    return prepare_completion(body, MODEL, ApiLimits(), MAX_MODEL_LEN)


def chat(served: ServedModel = MODEL, **fields: Any) -> Prepared:
    messages = [{"role": "user", "content": "hi"}]
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    return prepare_chat(body, served, ApiLimits(), MAX_MODEL_LEN)


def test_a_completion_becomes_ids_and_parameters() -> None:
    prepared = completion(prompt="abc", temperature=0, top_p=0.5, seed=7, stop=["x"], stream=True)
    assert prepared.choices[0].prompt_ids == [97, 98, 99]
    assert prepared.choices[0].params.max_tokens == 16
    assert prepared.choices[0].params.temperature == 0
    assert prepared.choices[0].params.top_p == 0.5
    assert prepared.choices[0].params.seed == 7
    assert prepared.choices[0].params.stop_token_ids == {260}
    assert prepared.stops == ("x",)
    assert prepared.stream


def test_openai_defaults_and_a_seed_of_ones_own() -> None:
    first, second = completion(prompt="a"), completion(prompt="a")
    assert (first.choices[0].params.temperature, first.choices[0].params.top_p) == (1.0, 1.0)
    assert first.choices[0].params.seed != second.choices[0].params.seed
    assert 0 <= completion(prompt="a", seed=-5).choices[0].params.seed < 2**63


def test_chat_goes_on_to_the_end_of_the_context() -> None:
    prepared = chat()
    assert (
        len(prepared.choices[0].prompt_ids) + prepared.choices[0].params.max_tokens == MAX_MODEL_LEN
    )


def test_a_default_that_does_not_fit_is_cut_but_a_wish_is_refused() -> None:
    assert completion(prompt=[1] * 60).choices[0].params.max_tokens == 4
    assert completion(prompt=[1] * 60, max_tokens=4).choices[0].params.max_tokens == 4
    with pytest.raises(ApiError, match="at most 4 may follow") as caught:
        completion(prompt=[1] * 60, max_tokens=5)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("prompt", [[1] * 64, "a" * 64, "a" * 1_000_000])
def test_a_prompt_that_fills_the_context_is_too_long(prompt: Any) -> None:
    with pytest.raises(ApiError, match="64 tokens") as caught:
        completion(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token_id", [-1, 263, 10**30])
def test_a_token_outside_the_vocabulary_is_refused(token_id: int) -> None:
    with pytest.raises(ApiError, match="position 1 is not in the vocabulary of 263"):
        completion(prompt=[0, token_id])


@pytest.mark.parametrize("prompt", ["", [], [""], [[]]])
def test_an_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="at least one token"):
        completion(prompt=prompt)


def test_another_model_is_404() -> None:
    with pytest.raises(ApiError, match="this server has 'm'") as caught:
        completion(prompt="a", model="other")
    assert caught.value.status == 404


def test_a_model_without_template_has_no_chat() -> None:
    bare = ServedModel("m", MODEL.tokenizer, None, 263, frozenset())
    with pytest.raises(ApiError, match="use /v1/completions"):
        chat(bare)


def test_what_the_template_refuses_is_the_clients_mistake() -> None:
    with pytest.raises(ApiError, match="roles are user and assistant") as caught:
        chat(messages=[{"role": "system", "content": "x"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_token_of_the_tokenizer_that_the_model_lacks_is_refused() -> None:
    smaller = replace(MODEL, vocab_size=256)
    with pytest.raises(ApiError, match="position 0 is not in the vocabulary of 256"):
        chat(smaller)
