"""What a real API server accepts and refuses of our kinds, and what it says then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from devcluster.api import ApiError
from devcluster.cluster import Cluster
from devcluster.errors import CommandFailed
from moe_api import names
from moe_api.deployment import InvalidSpec, parse
from tests.support.custom_objects import admit, apply
from tests.support.manifests import (
    RULE_CASES,
    every_field_spec,
    expert_placement,
    group_plan,
    moe_deployment,
)

pytestmark = pytest.mark.apiserver
Admit = Callable[[dict[str, Any]], dict[str, Any]]
Refusal = Callable[[dict[str, Any]], str]


@pytest.fixture
def admitted(definitions: Cluster) -> Admit:
    """What the API server would store of a manifest."""
    return lambda manifest: admit(definitions, manifest)


@pytest.fixture
def refusal(definitions: Cluster) -> Refusal:
    """The message with which the API server refuses a manifest."""

    def message(manifest: dict[str, Any]) -> str:
        with pytest.raises(ApiError) as refused:
            admit(definitions, manifest)
        assert refused.value.status in (400, 422), str(refused.value)
        return str(refused.value)

    return message


@pytest.mark.parametrize("case", RULE_CASES, ids=lambda case: case.rule.message[:50])
def test_rule_accepts_and_refuses_with_field_value_and_way_out(
    admitted: Admit, refusal: Refusal, case: Any
) -> None:
    admitted(moe_deployment("accepted", case.accepted))
    said = refusal(moe_deployment("refused", case.refused))
    for words in case.named:
        assert words in said


def test_defaults_filled_in_are_those_of_the_models(admitted: Admit) -> None:
    manifest = moe_deployment()
    assert admitted(manifest)["spec"] == parse(manifest).to_wire()


def test_every_field_is_stored_as_written(admitted: Admit) -> None:
    manifest = moe_deployment(spec=every_field_spec())
    stored = admitted(manifest)["spec"]
    assert stored == parse(manifest).to_wire()


def test_null_counts_as_left_out(admitted: Admit) -> None:
    spec = {"model": {"maxModelLen": None}, "router": {"capacityFactor": None}}
    stored = admitted(moe_deployment(spec=spec))["spec"]
    assert "maxModelLen" not in stored["model"]
    assert "capacityFactor" not in stored["router"]


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (0, "0: spec.parallelism.expert in body should be greater than or equal to 1"),
        (-1, "-1: spec.parallelism.expert in body should be greater than or equal to 1"),
        (1025, "1025: spec.parallelism.expert in body should be less than or equal to 1024"),
        ("three", "spec.parallelism.expert in body must be of type integer"),
    ],
)
def test_a09_width_without_meaning_is_refused_by_the_schema(
    refusal: Refusal, width: int | str, words: str
) -> None:
    assert words in refusal(moe_deployment(spec={"parallelism": {"expert": width}}))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 45, "has 45 characters: use at most 40"),
        ("a" * 63, "has 63 characters: use at most 40"),
        ("a" * 200, "has 200 characters: use at most 40"),
        ("tiny.moe", "is not a DNS-1035 label"),
        ("1tiny", "is not a DNS-1035 label"),
    ],
)
def test_f07_name_that_no_service_could_carry_is_refused(
    refusal: Refusal, name: str, words: str
) -> None:
    said = refusal(moe_deployment(name))
    assert "metadata.name" in said
    assert words in said
    with pytest.raises(InvalidSpec, match=words):
        parse(moe_deployment(name))


def test_f07_names_up_to_the_limit_have_children_that_fit(admitted: Admit) -> None:
    common = "a" * 38
    for name in ("a" * 30, f"{common}-1", f"{common}-2"):
        admitted(moe_deployment(name))
    children = [child for name in (f"{common}-1", f"{common}-2") for child in derived_names(name)]
    assert len(set(children)) == len(children)
    assert all(len(child) <= names.MAX_NAME for child in children)


def derived_names(name: str) -> list[str]:
    return [
        names.service_name(name),
        names.config_name(name),
        names.control_secret_name(name, "0a1b2c3d-0000-4000-8000-000000000000"),
        names.group_name(name, 63),
        names.pod_name(name, 63, 1023, "abcde"),
    ]


def test_kubectl_refuses_a_field_that_does_not_exist(definitions: Cluster, namespace: str) -> None:
    manifest = yaml.safe_dump(moe_deployment(spec={"kvcache": {"blocks": 3}}))
    with pytest.raises(CommandFailed, match="unknown field"):
        definitions.kubectl("apply", "-n", namespace, "-f", "-", stdin=manifest)


def test_overlay_is_kept_as_written(admitted: Admit) -> None:
    overlay = {"metadata": {"labels": {"a": "b"}}, "spec": {"anything": {"deep": [1, None, "x"]}}}
    stored = admitted(moe_deployment(spec={"worker": {"podTemplate": overlay}}))
    assert stored["spec"]["worker"]["podTemplate"] == overlay


def test_stored_plan_is_never_replaced_by_an_older_one(
    definitions: Cluster, namespace: str
) -> None:
    """The fence holds in the API server too: a leader of the past cannot write its plan."""

    def store(leader_epoch: int, generation: int, epoch: int) -> None:
        plan = group_plan(leader_epoch=leader_epoch, generation=generation, epoch=epoch)
        apply(definitions, expert_placement("tiny-g0", plan, namespace))

    for newer in ((3, 2, 7), (3, 2, 7), (3, 2, 8), (3, 3, 1), (4, 3, 1)):
        store(*newer)
    for older, said in (
        ((3, 9, 9), "leaderEpoch 3, generation 9, epoch 9 are older than the stored 4, 3, 1"),
        ((4, 2, 9), "read the object again"),
    ):
        with pytest.raises(ApiError, match=said):
            store(*older)
