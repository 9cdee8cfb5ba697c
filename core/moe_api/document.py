"""Base of every document that crosses a process border: JSON in camelCase, schema-checked,
immutable.

Neighbours: `plan`, `load`, `worker` derive from it; `deployment` and `status` use their own base
(the CRD).
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from moe_api.names import SCHEMA


class DocumentError(ValueError):
    """A document that this version cannot read: newer schema, wrong shape, or not JSON."""


class Part(BaseModel):
    """A piece of a document: camelCase on the wire, snake_case in code, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, populate_by_name=True
    )

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready dict in wire names; absent optionals are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class Document(Part):
    """A whole exchanged document. `schema` on the wire is `schema_version` in code."""

    schema_version: int = Field(default=SCHEMA, alias="schema")

    @model_validator(mode="before")
    @classmethod
    def _refuse_newer(cls, data: Any) -> Any:
        if isinstance(data, dict):
            found = data.get("schema", data.get("schema_version", SCHEMA))
            if isinstance(found, int) and found > SCHEMA:
                raise ValueError(
                    f"{cls.__name__} has schema {found}, this version reads up to {SCHEMA}: "
                    "upgrade the reader first"
                )
        return data

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Parse and validate.

        Raises:
            DocumentError: with the first offending field and value in one line.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or cls.__name__
            raise DocumentError(f"{cls.__name__}: {where}: {first['msg']}") from error
