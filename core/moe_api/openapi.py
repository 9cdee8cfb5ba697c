"""Models to structural OpenAPI v3 schemas, as the API server wants them in a CRD.

No references, no alternatives, no nulls: a field that may be absent is just not required (the API
server drops explicit nulls). Everything is bounded, since the cost of CEL rules is estimated from
bounds; a model that leaves a bound or a sentence out is refused here. Neighbour: `crd` asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from moe_api.block import Block

INT32_MAX = 2_147_483_647
KEPT = (
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "minItems",
    "maxItems",
    "maxProperties",
    "format",
    "enum",
)

Schema = dict[str, Any]
Describe = Callable[[str, str], str]
"""(wire path, sentence) to the description of the field at that path."""


class UnboundedSchema(ValueError):
    """A model that cannot become a CRD; the message names the field and what it lacks."""


def structural_schema(
    model: type[Block], *, defaults: bool, describe: Describe = lambda path, sentence: sentence
) -> Schema:
    """Schema of a block and all below it.

    Args:
        defaults: write defaults into the schema (a spec's are applied by the API server; a status
            has none).
        describe: changes the sentence of a field, given its wire path.

    Raises:
        UnboundedSchema: an integer without bounds, a string, list or map without a limit, or a
            field without a sentence.
    """
    return _Translation(model, defaults, describe).schema


class _Translation:
    def __init__(self, model: type[Block], defaults: bool, describe: Describe) -> None:
        source = model.model_json_schema(by_alias=True)
        self._definitions: dict[str, Schema] = source.pop("$defs", {})
        self._defaults = defaults
        self._describe = describe
        self.schema = self._translate(source, "")

    def _translate(self, source: Schema, path: str) -> Schema:
        source = self._flat(source)
        schema: Schema = {}
        if source.get("description"):
            schema["description"] = self._describe(path, _one_line(source["description"]))
        if "anyOf" in source:
            return schema | _int_or_string(source, path)
        schema["type"] = source["type"]
        if self._defaults and source.get("default") is not None:
            schema["default"] = _without_nulls(source["default"])
        schema |= {key: source[key] for key in KEPT if key in source}
        schema |= {key: value for key, value in source.items() if key.startswith("x-kubernetes-")}
        match source["type"]:
            case "integer":
                schema["format"] = _integer_format(source, path)
                if "enum" in source:
                    schema |= {"minimum": min(source["enum"]), "maximum": max(source["enum"])}
            case "number":
                schema |= _number_bounds(source, path)
            case "string" if "enum" not in source and "maxLength" not in source:
                raise UnboundedSchema(f"{path}: a string needs max_length")
            case "array":
                if "maxItems" not in source:
                    raise UnboundedSchema(f"{path}: a list needs max_length")
                schema["items"] = self._translate(source["items"], f"{path}[]")
            case "object":
                schema |= self._object(source, path)
        return schema

    def _object(self, source: Schema, path: str) -> Schema:
        if source.get("x-kubernetes-preserve-unknown-fields"):
            return {}
        if "properties" not in source:
            if "maxProperties" not in source:
                raise UnboundedSchema(f"{path}: a map needs max_length")
            values = self._translate(source["additionalProperties"], f"{path}{{}}")
            return {"additionalProperties": values}
        properties: Schema = {}
        for name, field in source["properties"].items():
            below = f"{path}.{name}" if path else name
            if "description" not in field:
                raise UnboundedSchema(f"{below}: a field needs a sentence")
            properties[name] = self._translate(field, below)
        schema: Schema = {"properties": properties}
        if source.get("required"):
            schema["required"] = source["required"]
        return schema

    def _flat(self, source: Schema) -> Schema:
        """References and optional types replaced by what they stand for; own keys win."""
        own = {key: value for key, value in source.items() if key not in ("$ref", "title")}
        if "$ref" in source:
            target = self._flat(self._definitions[source["$ref"].rsplit("/", 1)[1]])
            return target | own
        if "anyOf" in source:
            kinds = [kind for kind in source["anyOf"] if kind.get("type") != "null"]
            if len(kinds) == 1:
                own.pop("anyOf")
                return self._flat(kinds[0]) | own
        return own


def _integer_format(source: Schema, path: str) -> str:
    if "enum" in source:
        return "int32"
    if "minimum" not in source or "maximum" not in source:
        raise UnboundedSchema(f"{path}: an integer needs ge and le")
    return "int32" if max(-source["minimum"], source["maximum"]) <= INT32_MAX + 1 else "int64"


def _number_bounds(source: Schema, path: str) -> Schema:
    """OpenAPI 3.0 says with a flag that a bound is excluded."""
    bounds: Schema = {"format": "double"}
    if "exclusiveMinimum" in source:
        bounds |= {"minimum": source["exclusiveMinimum"], "exclusiveMinimum": True}
    elif "minimum" not in source:
        raise UnboundedSchema(f"{path}: a number needs ge or gt")
    if "maximum" not in source:
        raise UnboundedSchema(f"{path}: a number needs le")
    return bounds


def _int_or_string(source: Schema, path: str) -> Schema:
    """The one alternative a structural schema knows: a quantity."""
    if sorted(kind.get("type", "") for kind in source["anyOf"]) != ["integer", "string"]:
        raise UnboundedSchema(f"{path}: alternatives of types have no structural schema")
    return {
        "x-kubernetes-int-or-string": True,
        "anyOf": [{"type": "integer"}, {"type": "string"}],
        **{key: source[key] for key in KEPT if key in source},
    }


def _without_nulls(default: Any) -> Any:
    """A block's default holds its fields' defaults too: rules see it before those are filled in."""
    if isinstance(default, dict):
        return {k: _without_nulls(v) for k, v in default.items() if v is not None}
    return default


def _one_line(text: str) -> str:
    return " ".join(text.split())
