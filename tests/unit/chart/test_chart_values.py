"""Values of the chart: none, null, wrong types and unknown keys render, or are refused clearly."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.support.chart import CHART, Chart, Refused, of_kind
from tests.support.manifests import merged

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = yaml.safe_load((CHART / "values.schema.json").read_text())


Path = tuple[str, ...]


def paths(values: dict[str, Any], above: Path = ()) -> Iterator[Path]:
    """Every key at every level that the schema knows; below free-form maps it knows none."""
    for key, value in values.items():
        path = (*above, key)
        if schema_at(path) is not None:
            yield path
            if isinstance(value, dict):
                yield from paths(value, path)


def schema_at(path: Path) -> dict[str, Any] | None:
    node: dict[str, Any] = SCHEMA
    for key in path:
        node = node.get("properties", {}).get(key)
        if node is None:
            return None
    return node


def is_required(path: Path) -> bool:
    above = schema_at(path[:-1])
    return above is not None and path[-1] in above.get("required", [])


def with_each(values: dict[Path, Any]) -> dict[str, Any]:
    """Nested values from paths."""
    whole: dict[str, Any] = {}
    for path, value in values.items():
        whole = merged(whole, functools.reduce(lambda v, key: {key: v}, reversed(path), value))
    return whole


def wrong_for(path: Path) -> Any:
    node = schema_at(path)
    assert node is not None
    return ["text"] if node["type"] in ("object", "string") else "text"


TOP_LEVEL = [path for path in paths(VALUES) if len(path) == 1]
NESTED = [path for path in paths(VALUES) if len(path) > 1]


def test_h06_no_values_render(chart: Chart) -> None:
    assert chart.render()


@pytest.mark.parametrize("path", TOP_LEVEL, ids=".".join)
def test_h06_null_renders_or_is_refused_by_name(chart: Chart, path: Path) -> None:
    if is_required(path):
        with pytest.raises(Refused, match=f"missing property '{path[0]}'"):
            chart.render(with_each({path: None}))
    else:
        assert of_kind(chart.render(with_each({path: None})), "Deployment")


def test_h06_nested_null_renders_unless_required(chart: Chart) -> None:
    optional = [path for path in NESTED if not is_required(path)]
    assert of_kind(chart.render(with_each(dict.fromkeys(optional))), "Deployment")


def test_h06_nested_null_of_what_is_required_is_refused_by_name(chart: Chart) -> None:
    required = [path for path in NESTED if is_required(path) and schema_at(path)]
    with pytest.raises(Refused) as refused:
        chart.render(with_each(dict.fromkeys(required)))
    for path in required:
        if any(other[:-1] == path for other in required):
            continue
        assert re.search(rf"at '/{'/'.join(path[:-1])}': missing propert.*'{path[-1]}'",
                         str(refused.value)), path  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_h06_wrong_types_are_refused_by_the_schema(chart: Chart, depth: int) -> None:
    wrong = {path: wrong_for(path) for path in paths(VALUES) if len(path) == depth}
    with pytest.raises(Refused) as refused:
        chart.render(with_each(wrong))
    for path in wrong:
        assert f"at '/{'/'.join(path)}'" in str(refused.value)


def test_unknown_key_is_refused_by_name(chart: Chart) -> None:
    with pytest.raises(Refused, match="additional properties 'replicaCount' not allowed"):
        chart.render({"replicaCount": 2})
    with pytest.raises(Refused, match="additional properties 'name' not allowed"):
        chart.render({"image": {"name": "x"}})


def test_lease_times_that_contradict_each_other_are_refused(chart: Chart) -> None:
    with pytest.raises(Refused, match="leaseDurationSeconds 10 must exceed"):
        chart.render({"leaderElection": {"leaseDurationSeconds": 10}})


def test_service_monitor_without_service_is_refused(chart: Chart) -> None:
    metrics = {"service": {"enabled": False}, "serviceMonitor": {"enabled": True}}
    with pytest.raises(Refused, match="set both to true"):
        chart.render({"metrics": metrics})


def test_schema_and_defaults_have_the_same_keys() -> None:
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)
