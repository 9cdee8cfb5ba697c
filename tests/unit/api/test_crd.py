"""The generated definitions: byte for byte in both folders, structural, bounded, explained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from moe_api.block import Block
from moe_api.crd import deployment_crd, main, placement_crd, render, stale_files
from moe_api.openapi import UnboundedSchema, structural_schema
from moe_api.placement import ExpertPlacementSpec
from moe_api.plan import GroupPlan

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = [ROOT / "crds", ROOT / "charts/moe-operator/files"]


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    schema: dict[str, Any] = version["schema"]["openAPIV3Schema"]
    return schema


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, f"{path}.{name}")
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_files_equal_the_generators_output_byte_for_byte(folder: Path) -> None:
    assert {path.name: path.read_bytes() for path in folder.glob("*.yaml")} == {
        name: content.encode() for name, content in render().items()
    }


def test_check_names_the_file_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--write", str(tmp_path)]) == 0
    assert main(["--check", str(tmp_path)]) == 0
    changed = sorted(tmp_path.iterdir())[0]
    changed.write_text(changed.read_text() + "\n")
    assert stale_files([tmp_path]) == [changed]
    assert main(["--check", str(tmp_path)]) == 1
    assert changed.name in capsys.readouterr().err


@pytest.mark.parametrize("crd", [deployment_crd(), placement_crd()], ids=["moed", "xp"])
def test_schema_is_structural_bounded_and_explained(crd: dict[str, Any]) -> None:
    for path, node in nodes(schema_of(crd)):
        assert "$ref" not in node, path
        assert "nullable" not in node, path
        if path.startswith((".spec", ".status")):
            assert node.get("description") or path.endswith("[]"), path
        if node.get("x-kubernetes-preserve-unknown-fields"):
            assert path == ".spec.worker.podTemplate"
        if node.get("type") == "array":
            assert node["maxItems"] >= 1, path
            assert node["x-kubernetes-list-type"] in ("map", "atomic", "set"), path
        if node.get("type") == "integer":
            assert node["minimum"] <= node["maximum"], path
            assert node["format"] in ("int32", "int64"), path


def test_either_or_fields_have_no_schema_default() -> None:
    spec = schema_of(deployment_crd())["properties"]["spec"]["properties"]
    for block, field in [
        ("experts", "slotsPerRank"),
        ("experts", "redundantSlotsPerRank"),
        ("kvCache", "memoryFraction"),
        ("kvCache", "blocks"),
        ("topology", "levels"),
    ]:
        assert "default" not in spec[block]["properties"][field], field
        assert "default" in spec[block]


def test_status_has_no_defaults() -> None:
    for crd in (deployment_crd(), placement_crd()):
        for path, node in nodes(schema_of(crd)["properties"]["status"]):
            assert "default" not in node, path


def test_scale_reads_replicas_and_a_selector_string() -> None:
    (version,) = deployment_crd()["spec"]["versions"]
    assert version["subresources"]["scale"]["labelSelectorPath"] == ".status.selector"
    status = schema_of(deployment_crd())["properties"]["status"]["properties"]
    assert status["selector"]["type"] == "string"


def test_uninstalling_the_chart_keeps_the_definitions() -> None:
    for crd in (deployment_crd(), placement_crd()):
        assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_explain_says_what_is_not_honoured_yet() -> None:
    spec = schema_of(deployment_crd())["properties"]["spec"]["properties"]
    assert "not honoured yet" in spec["topology"]["properties"]["pack"]["description"]
    autoscaling = spec["autoscaling"]["properties"]["mode"]["description"]
    assert "besides the default: External" in autoscaling
    assert "honoured" not in spec["replicas"]["description"]


def test_placement_spec_has_the_fields_of_the_plan() -> None:
    assert wire_fields(ExpertPlacementSpec) == wire_fields(GroupPlan)


def wire_fields(model: type[BaseModel]) -> set[str]:
    """Wire paths of all fields below a model."""

    def walk(schema: dict[str, Any], path: str) -> Iterator[str]:
        for kind in schema.get("anyOf", [schema]):
            if "$ref" in kind:
                yield from walk(definitions[kind["$ref"].rsplit("/", 1)[1]], path)
            elif "items" in kind:
                yield from walk(kind["items"], f"{path}[]")
            for name, field in kind.get("properties", {}).items():
                yield f"{path}.{name}"
                yield from walk(field, f"{path}.{name}")

    schema = model.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs", {})
    return set(walk(schema, ""))


class Unbounded(Block):
    """A block."""

    number: int
    """A number."""


class Unexplained(Block):
    """A block."""

    number: Annotated[int, Field(ge=0, le=1)] = 0


class Boundless(Block):
    """A block."""

    words: list[str]
    """Words."""


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Unbounded, "number: an integer needs ge and le"),
        (Unexplained, "number: a field needs a sentence"),
        (Boundless, "words: a list needs max_length"),
    ],
)
def test_model_without_bound_or_sentence_is_refused(model: type[Block], message: str) -> None:
    with pytest.raises(UnboundedSchema, match=message):
        structural_schema(model, defaults=True)
