"""Every field of the spec is honoured, or reported when it is set (SpecHonoured)."""

from __future__ import annotations

from moe_api.deployment import MoEDeploymentSpec, parse
from moe_api.honoured import HONOURED, HONOURED_VALUES, honoured, ignored_fields, spec_fields
from tests.support.manifests import every_field_spec, moe_deployment


def full_spec() -> MoEDeploymentSpec:
    return parse(moe_deployment(spec=every_field_spec()))


def test_defaults_are_not_reported() -> None:
    assert ignored_fields(parse(moe_deployment())) == []


def test_each_field_is_honoured_or_reported() -> None:
    spec = full_spec()
    reported = set(ignored_fields(spec))
    either_or = {"experts.redundantSlotsPerRank", "kvCache.blocks"}
    for path in set(spec_fields()) - either_or:
        value = spec.at(path)
        by_value = path in HONOURED_VALUES and value in HONOURED_VALUES[path]
        assert (path in reported) != (path in HONOURED or by_value), path


def test_lists_name_only_fields_that_exist() -> None:
    assert set(HONOURED_VALUES) | HONOURED <= set(spec_fields())
    assert not set(HONOURED_VALUES) & HONOURED


def test_values_decide_where_only_some_are_honoured() -> None:
    accepted = parse(moe_deployment(spec={"autoscaling": {"mode": "External"}}))
    refused = parse(moe_deployment(spec={"autoscaling": every_field_spec()["autoscaling"]}))
    assert ignored_fields(accepted) == []
    assert refused.autoscaling.mode == "Prometheus"
    assert "autoscaling.mode" in ignored_fields(refused)


def test_honoured_spec_has_ignored_fields_at_their_defaults() -> None:
    spec = full_spec()
    acted_on = honoured(spec)
    assert ignored_fields(acted_on) == []
    assert acted_on.kv_cache.dtype == "k8v4"
    assert acted_on.topology.pack is None
    assert acted_on.topology.levels == spec.topology.levels
    assert acted_on.worker == spec.worker


def test_honoured_leaves_an_honoured_spec_alone() -> None:
    spec = parse(moe_deployment(spec={"parallelism": {"expert": 3}}))
    assert honoured(spec) == spec
