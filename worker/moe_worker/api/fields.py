"""Kinds of fields that bodies are made of, with their bounds.

Bounds are checked before work is done for what is beyond them. Neighbours: `openai`, `messages`
and `formats` are made of these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

MAX_STOP_CHARACTERS = 1024
MOST_STOP_STRINGS = 64
"""Highest `spec.api.maxStopStrings`; a deployment's own limit is checked after parsing."""
MOST_CHOICES = 64
"""Highest `spec.api.maxChoices`, likewise."""
MAX_TOKENS = 2**31 - 1
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_USER_CHARACTERS = 512
MAX_SALT_CHARACTERS = 256

Prompt = str | list[int]
TOKEN_ID = re.compile(r"[0-9]{1,9}")


class Body(BaseModel):
    """Part of a request; what it does not know is refused by name, never ignored."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def _prompts(value: Any) -> list[Prompt]:
    """OpenAI's four spellings: a text, texts, token ids, lists of token ids."""
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and (
        all(isinstance(item, str) for item in value) or all(_is_ids(item) for item in value)
    ):
        if len(value) <= MOST_CHOICES:
            return value
        most = {"most": MOST_CHOICES}
        raise PydanticCustomError("too_many", "must be at most {most} prompts", most)
    raise PydanticCustomError(
        "prompt", "must be a text, a list of token ids, or a list of texts or of such lists"
    )


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _whole(value: Any) -> Any:
    """JSON has no integers: 5.0 is one in any schema, and some clients write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _stop_list(value: Any) -> Any:
    if isinstance(value, list) and len(value) > MOST_STOP_STRINGS:
        most = {"most": MOST_STOP_STRINGS}
        raise PydanticCustomError("too_many", "must be at most {most} strings", most)
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Mapping[int, float]:
    if not isinstance(value, dict):
        raise PydanticCustomError("bias", "must be an object: token id → number")
    if len(value) > MAX_LOGIT_BIASES:
        most = {"most": MAX_LOGIT_BIASES}
        raise PydanticCustomError("too_many", "must name at most {most} tokens", most)
    for token, bias in value.items():
        if not TOKEN_ID.fullmatch(token):
            raise PydanticCustomError("bias", "keys must be token ids: whole numbers as text")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise PydanticCustomError("bias", "values must be numbers from -100 to 100")
    return {int(token): float(bias) for token, bias in value.items()}


_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_MANY = {"type": "array", "minItems": 1, "maxItems": MOST_CHOICES}
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stops = Annotated[
    list[StopString],
    BeforeValidator(
        _stop_list,
        json_schema_input_type=StopString
        | Annotated[list[StopString], Field(max_length=MOST_STOP_STRINGS)],
    ),
]
Prompts = Annotated[
    list[Prompt],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [_TEXT, _IDS, {**_MANY, "items": _TEXT}, {**_MANY, "items": _IDS}]}),
]
LogitBias = Annotated[
    Mapping[int, float],
    PlainValidator(_biases),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Whole = BeforeValidator(_whole)
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), Whole]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), Whole]
TopK = Annotated[int, Field(ge=-1, le=2**31 - 1), Whole]
NumChoices = Annotated[int, Field(ge=1, le=MOST_CHOICES), Whole]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1), Whole]
Penalty = Annotated[float, Field(ge=-2, le=2)]
User = Annotated[str, Field(max_length=MAX_USER_CHARACTERS)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)]
