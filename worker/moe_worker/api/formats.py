"""What a chat answer must look like: response formats and tools, as clients ask for them.

Schemas are free JSON here; whether they can be followed is found out by `text.grammar`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from moe_worker.api.fields import Body
from moe_worker.api.messages import FunctionName

MAX_TOOLS = 128
MAX_DESCRIPTION_CHARACTERS = 65_536

Description = Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARACTERS)]


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class JsonSchema(Body):
    name: FunctionName
    description: Description | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class Function(Body):
    name: FunctionName
    description: Description | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As clients wrote it, which is what models were trained on."""
        return self.model_dump(exclude_unset=True)


class NamedFunction(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool
Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS)]
