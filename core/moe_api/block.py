"""Block: a piece of a custom resource, and the rules between its fields.

The sentence under each field becomes its description in the CRD, its bounds become the schema's,
its rules become CEL (`moe_api.crd`); the same bounds and rules hold in Python, so a spec is judged
alike with and without an API server. Neighbours: `deployment`, `workload`, `policy`, `topology`,
`status`, `placement`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema


@dataclass(frozen=True)
class CelRule:
    """A relation between fields of a block, refused at admission with a way out in the message.

    `cel` sees the block as `self`; `holds` is the same relation in Python. `explain` is a format
    with the values of `values` (wire paths below the block) put in and begins with the field's path
    below spec; `message` is the static text beside it, shown where the API server cannot evaluate
    the other.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    explain: str = ""
    values: tuple[str, ...] = ()
    uses_old: bool = False
    """A transition rule (`oldSelf`): checked by the API server alone."""

    @property
    def message_expression(self) -> str | None:
        """CEL that formats the message; concatenating string(number) exceeds the cost budget."""
        if not self.explain:
            return None
        quoted = self.explain.replace("\\", "\\\\").replace("'", "\\'")
        scoped = (p if p.startswith("oldSelf.") else f"self.{p}" for p in self.values)
        return f"'{quoted}'.format([{', '.join(scoped)}])"

    def to_schema(self) -> dict[str, str]:
        """An item of x-kubernetes-validations."""
        schema = {"rule": self.cel, "message": self.message}
        if self.message_expression is not None:
            schema["messageExpression"] = self.message_expression
        return schema

    def text(self, block: Block) -> str:
        """The message with this block's values in it."""
        if not self.explain:
            return self.message
        return self.explain % tuple(block.at(path) for path in self.values)


class Block(BaseModel):
    """camelCase on the wire, snake_case in code, immutable; no unknown fields, no coercions."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )
    RULES: ClassVar[tuple[CelRule, ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        schema = handler(core_schema)
        whole = handler.resolve_ref_schema(schema)
        for name, field in cls.model_fields.items():
            entry = whole["properties"][field.alias or name]
            # pydantic itself forgets the sentence of a block that has a default, and made defaults
            if field.description:
                entry["description"] = field.description
            if field.default_factory is not None:
                entry["default"] = field.get_default(call_default_factory=True)
        if cls.RULES:
            whole["x-kubernetes-validations"] = [rule.to_schema() for rule in cls.RULES]
        return schema

    @model_validator(mode="after")
    def _keep_rules(self) -> Self:
        for rule in self.RULES:
            if not rule.uses_old and not rule.holds(self):
                raise ValueError(rule.text(self))
        return self

    def at(self, path: str) -> Any:
        """Value at a dotted wire path below this block, e.g. `budget.maxMovesPerRound`."""
        value: Any = self
        for key in path.split("."):
            names = {field.alias or name: name for name, field in type(value).model_fields.items()}
            value = getattr(value, names[key])
        return value

    def to_wire(self) -> dict[str, Any]:
        """JSON-ready dict in wire names; absent optionals are left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class ObservedBlock(Block):
    """A block the operator wrote and reads again; fields of a newer version are passed over."""

    model_config = ConfigDict(extra="ignore", strict=False)


def list_map(*keys: str) -> dict[str, Any]:
    """Schema extras of a list whose items are found by `keys`."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


ATOMIC: dict[str, Any] = {"x-kubernetes-list-type": "atomic"}
SET: dict[str, Any] = {"x-kubernetes-list-type": "set"}

Timestamp = Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})]
"""RFC 3339, UTC."""

ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
Count = Annotated[int, Field(ge=0, le=2_147_483_647)]
BigCount = Annotated[int, Field(ge=0, le=9_007_199_254_740_991)]
"""Up to 2**53 - 1, which JSON readers keep exactly."""
Text = Annotated[str, Field(max_length=1024)]


class SecretKeyRef(Block):
    """One key of a Secret in the deployment's namespace."""

    name: ObjectName
    """Name of the Secret."""
    key: Annotated[str, Field(min_length=1, max_length=253)] = "token"
    """Key in the Secret's data."""
