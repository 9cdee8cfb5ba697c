"""The messages of a chat, as clients send them and as templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moe_worker.api.fields import Body

MAX_NAME_CHARACTERS = 64
MAX_CALLS = 128


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


class TextPart(Body):
    type: Literal["text"]
    text: str


FunctionName = Annotated[
    str, Field(pattern=r"^[a-zA-Z0-9_-]+$", min_length=1, max_length=MAX_NAME_CHARACTERS)
]
Content = Annotated[
    str, BeforeValidator(_joined_parts, json_schema_input_type=str | list[TextPart])
]


class CalledFunction(Body):
    name: FunctionName
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Body):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Templates write the arguments themselves, so they get them parsed where they are JSON."""
        try:
            arguments = json.loads(self.function.arguments)
        except ValueError:
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: Annotated[list[ToolCall], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    refusal: None = None
    """Clients send an answer back as they got it."""

    @model_validator(mode="after")
    def _fields_of_the_role(self) -> Self:
        if self.tool_calls is not None and self.role != "assistant":
            raise PydanticCustomError("message", "tool_calls are for role assistant only")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise PydanticCustomError("message", "tool_call_id belongs to role tool alone")
        if self.content is None and self.tool_calls is None:
            raise PydanticCustomError("message", "content is missing")
        return self

    @property
    def text(self) -> str:
        """All that the model reads of it."""
        calls = self.tool_calls or []
        return "".join([self.content or "", *(call.function.arguments for call in calls)])

    def for_template(self) -> dict[str, Any]:
        """`developer` is what newer clients call `system`; templates know the latter."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        if self.tool_calls is not None:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message
