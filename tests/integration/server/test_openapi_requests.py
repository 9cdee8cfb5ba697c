"""Requests made up from our OpenAPI document: none fails the server, none is answered unlike the
document says, and what the document forbids is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.config import (
    GenerationConfig,
    ProjectConfig,
    ProjectsConfig,
    SchemathesisConfig,
)
from schemathesis.specs.openapi import checks

from moe_worker.api.openapi import openapi_document
from tests.support.byte_tokenizer import END, byte_tokenizer
from tests.support.fake_engine import FakeEngine
from tests.support.http_worker import MODEL_NAME, HttpWorker, http_worker

TOKENIZER = byte_tokenizer()
EXAMPLES = 20
CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
    checks.unsupported_method,
]
"""Fields that are right alone may contradict each other; see `plain_document`."""


def document() -> dict[str, Any]:
    """Ours, but with the name of the one model, so that requests get past it."""
    described = openapi_document()
    for request in ("CompletionRequest", "ChatRequest"):
        properties = described["components"]["schemas"][request]["properties"]
        properties["model"] = {"const": MODEL_NAME}
    return described


def plain_document() -> dict[str, Any]:
    """Only such requests as must be answered: within this model's limits, and without fields that
    need one another."""
    described = document()
    schemas = described["components"]["schemas"]
    within: dict[str, Any] = {
        "logit_bias": {"type": "object", "patternProperties": {"^[0-9]{2}$": {"const": 1}}},
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": 16},
        "n": {"type": "integer", "minimum": 1, "maximum": 2},
        "stop": {"type": "string", "minLength": 1, "maxLength": 9},
        "prompt": {
            "anyOf": [
                {"type": "string", "pattern": "^[a-z ]{1,20}$"},
                {"type": "array", "minItems": 1, "maxItems": 20, "items": {"enum": [1, 97, 255]}},
            ]
        },
        "messages": {"type": "array", "minItems": 1, "maxItems": 3, "items": _MESSAGE},
    }
    within["logit_bias"]["additionalProperties"] = False
    within["max_completion_tokens"] = {"const": None}
    for request in ("CompletionRequest", "ChatRequest"):
        properties = schemas[request]["properties"]
        for name in _NEED_OTHERS & properties.keys():
            del properties[name]
        properties.update({name: within[name] for name in within.keys() & properties.keys()})
    described["paths"] = {path: item for path, item in described["paths"].items() if "post" in item}
    return described


_NEED_OTHERS = {
    "stream_options",
    "top_logprobs",
    "response_format",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}},
    "required": ["role", "content"],
    "additionalProperties": False,
}


def config(*modes: GenerationMode) -> SchemathesisConfig:
    generation = GenerationConfig(modes=list(modes))
    return SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))


EVERYTHING = schemathesis.openapi.from_dict(
    document(), config=config(GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
)
PLAIN = schemathesis.openapi.from_dict(plain_document(), config=config(GenerationMode.POSITIVE))
BOUNDED = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def worker() -> Iterator[HttpWorker]:
    engine = FakeEngine(lambda prompt: TOKENIZER.encode("Hello" + END).ids, max_model_len=4096)
    with http_worker(engine) as running:
        yield running


@EVERYTHING.parametrize()
@BOUNDED
def test_requests_made_up_from_the_document(case: schemathesis.Case, worker: HttpWorker) -> None:
    case.call_and_validate(base_url=worker.public_url, checks=CHECKS, timeout=20)


@PLAIN.parametrize()
@BOUNDED
def test_plain_requests_are_answered(case: schemathesis.Case, worker: HttpWorker) -> None:
    wanted = [*CHECKS, checks.positive_data_acceptance]
    case.call_and_validate(base_url=worker.public_url, checks=wanted, timeout=20)


def test_the_document_is_served(worker: HttpWorker) -> None:
    with worker.client() as client:
        assert client.get("/openapi.json").json() == openapi_document()
