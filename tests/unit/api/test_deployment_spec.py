"""Parsing a MoEDeployment: defaults, either-or fields, refusals with field and way out."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api.deployment import (
    InvalidSpec,
    max_replicas,
    memory_fraction,
    parse,
    physical_slots_per_rank,
    slots_per_rank,
)
from moe_api.serving import Experts, KvCache
from tests.support.manifests import RULE_CASES, all_rules, every_field_spec, moe_deployment


def test_defaults_are_those_of_the_contract() -> None:
    wire = parse(moe_deployment()).to_wire()
    assert wire["replicas"] == 1
    assert wire["parallelism"] == {"expert": 1}
    assert wire["kvCache"]["dtype"] == "nvfp4"
    assert "memoryFraction" not in wire["kvCache"]
    assert "slotsPerRank" not in wire["experts"]
    assert wire["rebalancing"]["budget"]["maxBytesPerSecond"] == 200_000_000
    assert wire["autoscaling"]["stabilization"] == {"upSeconds": 0, "downSeconds": 300}
    assert wire["router"]["overflow"] == ["Replica", "Spill"]


def test_every_field_survives_parsing() -> None:
    manifest = moe_deployment(spec=every_field_spec())
    assert parse(manifest).to_wire() == manifest["spec"] | _filled_in(manifest["spec"])


def _filled_in(spec: dict[str, Any]) -> dict[str, Any]:
    """What parsing adds: the default of the one field left out below a list."""
    worker = dict(spec["worker"])
    literal, from_secret, from_config = worker["env"]
    config = from_config["valueFrom"]["configMapKeyRef"] | {"optional": False}
    from_config = from_config | {"valueFrom": {"configMapKeyRef": config}}
    return {"worker": worker | {"env": [literal, from_secret, from_config]}}


@pytest.mark.parametrize(
    ("experts", "slots"),
    [
        (Experts(), 3),
        (Experts(redundant_slots_per_rank=0), 2),
        (Experts(redundant_slots_per_rank=4), 6),
        (Experts(slots_per_rank=9), 9),
    ],
)
def test_slots_per_rank_is_given_or_computed(experts: Experts, slots: int) -> None:
    assert slots_per_rank(experts, num_experts=8, num_ranks=4) == slots
    assert physical_slots_per_rank(experts, num_experts=8, num_ranks=4) == slots + 1


def test_slots_are_rounded_up_without_divisibility() -> None:
    assert slots_per_rank(Experts(), num_experts=16, num_ranks=3) == 7


def test_other_either_or_fields_resolve() -> None:
    assert memory_fraction(KvCache()) == 0.85
    assert memory_fraction(KvCache(blocks=8)) is None
    assert max_replicas(Experts(), num_ranks=3) == 3
    assert max_replicas(Experts(max_replicas=2), num_ranks=3) == 2


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.rule.message[:50])
def test_rule_accepts_and_refuses(case: Any) -> None:
    parse(moe_deployment(spec=case.accepted))
    with pytest.raises(InvalidSpec) as refusal:
        parse(moe_deployment(spec=case.refused))
    for words in case.named:
        assert words in str(refusal.value)


def test_every_rule_has_a_case() -> None:
    assert {case.rule for case in RULE_CASES} == set(all_rules())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"replicas": -1}, "spec.replicas is -1: input should be greater than or equal to 0"),
        ({"parallelism": {"expert": 0}}, "spec.parallelism.expert is 0"),
        ({"parallelism": {"expert": "3"}}, "spec.parallelism.expert is '3'"),
        ({"kvCache": {"blockSize": 24}}, "spec.kvCache.blockSize is 24"),
        ({"kvcache": {}}, "spec.kvcache is not a field of this version"),
        ({"model": {"uri": None}}, "spec.model.uri is None"),
        ({"rebalancing": {"minGainPercent": float("nan")}}, "spec.rebalancing.minGainPercent"),
        (
            {"worker": {"resources": {"limits": {"memory": 1.5}}}},
            "spec.worker.resources.limits.memory",
        ),
    ],
)
def test_fault_is_one_line_with_field_and_value(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        parse(moe_deployment(spec=spec))
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_model_uri_is_required() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.model is missing: set it"):
        parse({"metadata": {"name": "tiny"}, "spec": {}})


@pytest.mark.parametrize(
    "name", ["a" * 41, "a" * 63, "a" * 200, "tiny.moe", "1tiny", "Tiny", "tiny-", ""]
)
def test_f07_name_that_no_service_could_carry_is_refused(name: str) -> None:
    with pytest.raises(InvalidSpec, match=r"metadata\.name"):
        parse(moe_deployment(name))


def test_reserved_key_of_the_overlay_is_refused_by_name() -> None:
    overlay = {"spec": {"restartPolicy": "Always"}}
    with pytest.raises(InvalidSpec, match=r"podTemplate\.spec\.restartPolicy is not yours to set"):
        parse(moe_deployment(spec={"worker": {"podTemplate": overlay}}))
