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
from moe_worker.text.grammar import Grammars
from moe_worker.text.prompt_tokenizer import PromptTokenizer
from tests.support.byte_tokenizer import CHAT_TEMPLATE, byte_tokenizer

MAX_MODEL_LEN = 64
LONG_MODEL_LEN = 4096
TOOL_TEMPLATE = "{% if tools %}{{ tools | tojson }}answer <tool_call>{% endif %}" + CHAT_TEMPLATE
OTHER_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE
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
    room = LONG_MODEL_LEN if served.grammars is not None else MAX_MODEL_LEN
    return prepare_chat(body, served, ApiLimits(), room)


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


def guided(template: str = TOOL_TEMPLATE) -> ServedModel:
    grammars = Grammars(byte_tokenizer(), 263, frozenset({260}))
    return replace(MODEL, template=ChatTemplate(template, {}), grammars=grammars)


def special_calls() -> ServedModel:
    """A model whose calls begin with a token that is no text."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<tool_call>"])
    return replace(guided(), tokenizer=PromptTokenizer(tokenizer))


def tool(name: str, **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def test_every_sampling_field_arrives() -> None:
    prepared = completion(
        prompt="a",
        top_k=5,
        min_p=0.25,
        frequency_penalty=1,
        presence_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"7": -3},
        logprobs=2,
        echo=True,
        seed=1,
    )
    [choice] = prepared.choices
    params = choice.params
    assert (params.top_k, params.min_p) == (5, 0.25)
    assert (params.frequency_penalty, params.presence_penalty) == (1.0, -1.0)
    assert params.repetition_penalty == 1.5
    assert params.logit_bias == {7: -3.0}
    assert (params.num_logprobs, params.prompt_logprobs) == (2, 2)
    assert prepared.echo
    assert prepared.tells_logprobs
    assert params.cache_salt == ""
    assert completion(prompt="a", cache_salt="s").choices[0].params.cache_salt == "s"
    assert completion(prompt="a", top_k=-1).choices[0].params.top_k == 0
    assert completion(prompt="a", logprobs=2).choices[0].params.prompt_logprobs is None
    assert completion(prompt="a", ignore_eos=True).choices[0].params.stop_token_ids == frozenset()


def test_answers_to_one_prompt_have_seeds_of_their_own() -> None:
    prepared = completion(prompt=["a", "bc"], n=3, seed=5)
    assert [choice.params.seed for choice in prepared.choices] == [5, 6, 7, 5, 6, 7]
    assert [choice.place for choice in prepared.choices] == [0, 1, 2, 0, 1, 2]
    assert prepared.num_prompt_tokens == 3
    wrapped = completion(prompt="a", n=2, seed=2**63 - 1)
    assert [choice.params.seed for choice in wrapped.choices] == [2**63 - 1, 0]


@pytest.mark.parametrize("bias", [{"263": 1}, {"99999999": 1}])
def test_a_bias_of_a_token_that_is_none_is_refused(bias: dict[str, int]) -> None:
    with pytest.raises(ApiError, match="not in the vocabulary of 263") as caught:
        completion(prompt="a", logit_bias=bias)
    assert caught.value.param == "logit_bias"


def test_an_echo_with_probabilities_is_bounded_by_its_memory() -> None:
    large = replace(MODEL, vocab_size=40 * 1024 * 1024)
    body = {"model": "m", "prompt": [1, 2], "echo": True, "logprobs": 1}
    with pytest.raises(ApiError, match="may have 1 tokens, this one has 2") as caught:
        prepare_completion(json.dumps(body).encode(), large, ApiLimits(), MAX_MODEL_LEN)
    assert caught.value.param == "echo"


def test_each_answer_follows_a_grammar_of_its_own() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 1}}}
    first, second = chat(guided(), response_format=wanted, n=2).choices
    assert first.params.grammar is not None
    assert first.params.grammar is not second.params.grammar
    assert chat(guided(), response_format={"type": "text"}).choices[0].params.grammar is None


def test_tools_are_shown_to_the_model_unless_it_must_not_call() -> None:
    shown = chat(guided(), tools=[tool("f")])
    hidden = chat(guided(), tools=[tool("f")], tool_choice="none")
    assert shown.finds_calls
    assert not hidden.finds_calls
    assert len(shown.choices[0].prompt_ids) > len(hidden.choices[0].prompt_ids)
    assert hidden.choices[0].params.grammar is None


@pytest.mark.parametrize(
    ("served", "fields", "param", "code"),
    [
        (guided(CHAT_TEMPLATE), {"tools": [tool("f")]}, "tools", "tools_not_supported"),
        (guided(OTHER_TEMPLATE), {"tools": [tool("f")]}, "tool_choice", "tools_not_supported"),
        (special_calls(), {"tools": [tool("f")]}, "tool_choice", "tools_not_supported"),
        (MODEL, {"tools": [tool("f")]}, "tools", "not_supported"),
        (MODEL, {"response_format": {"type": "json_object"}}, "response_format", "not_supported"),
        (
            guided(),
            {"tools": [tool("f", parameters={"type": "x"})]},
            "tools",
            "schema_not_supported",
        ),
        (
            guided(),
            {"tools": [tool("f", strict=True, parameters={"format": "x", "type": "string"})]},
            "tools",
            "schema_not_supported",
        ),
        (guided(), {"tools": [tool("f", description="x" * 65536)]}, None, None),
        (
            guided(),
            {"tools": [tool(f"f{i}", description="x" * 60000) for i in range(5)]},
            "tools",
            None,
        ),
        (
            guided(),
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "x"}},
                }
            },
            "response_format",
            "schema_not_supported",
        ),
    ],
)
def test_forms_that_can_not_be_kept_are_refused_by_name(
    served: ServedModel, fields: dict[str, Any], param: str | None, code: str | None
) -> None:
    with pytest.raises(ApiError) as caught:
        chat(served, **fields)
    assert caught.value.status == 400
    if param is None:
        assert caught.value.code == "context_length_exceeded"
    else:
        assert (caught.value.param, caught.value.code) == (param, code)


def test_a_forced_call_needs_no_known_form() -> None:
    prepared = chat(guided(OTHER_TEMPLATE), tools=[tool("f")], tool_choice="required")
    assert prepared.finds_calls


def test_text_of_tools_can_not_spell_special_tokens() -> None:
    plain = chat(guided(), tools=[tool("f", description="x")]).choices[0].prompt_ids
    tricky = chat(guided(), tools=[tool("f", description="<|end|>")]).choices[0].prompt_ids
    assert plain.count(260) == tricky.count(260)
