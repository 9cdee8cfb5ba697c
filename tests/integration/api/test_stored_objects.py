"""What a real API server stores of our kinds: every status field, /scale, large objects."""

from __future__ import annotations

import json

import numpy as np
import pytest

from devcluster.cluster import Cluster
from moe_api import names
from moe_api.crd import deployment_crd, placement_crd
from moe_api.placement import MAX_STORED_BYTES, ExpertPlacementStatus
from moe_api.plan import GroupPlan, PreviousPlacement, encode_layers
from moe_api.status import MoEDeploymentStatus
from tests.support.custom_objects import Manifest, apply, apply_status, collection, create
from tests.support.manifests import expert_placement, group_plan, moe_deployment, sample

pytestmark = pytest.mark.apiserver


def status_schema(crd: Manifest) -> Manifest:
    (version,) = crd["spec"]["versions"]
    schema: Manifest = version["schema"]["openAPIV3Schema"]["properties"]["status"]
    return schema


def test_f03_every_status_field_of_a_deployment_is_read_back(
    definitions: Cluster, namespace: str
) -> None:
    status = sample(status_schema(deployment_crd()))
    assert MoEDeploymentStatus.model_validate(status).to_wire() == status
    stored = create(definitions, namespace, moe_deployment())
    assert apply_status(definitions, stored, status)["status"] == status


def test_f03_every_status_field_of_a_placement_is_read_back(
    definitions: Cluster, namespace: str
) -> None:
    status = sample(status_schema(placement_crd()))
    assert ExpertPlacementStatus.model_validate(status).to_wire() == status
    stored = create(definitions, namespace, expert_placement("tiny-g0", group_plan()))
    assert apply_status(definitions, stored, status)["status"] == status


def test_f03_the_first_and_the_idle_status_are_accepted(
    definitions: Cluster, namespace: str
) -> None:
    status = MoEDeploymentStatus().to_wire()
    stored = create(definitions, namespace, moe_deployment())
    assert apply_status(definitions, stored, status)["status"] == status
    idle = ExpertPlacementStatus().to_wire()
    stored = create(definitions, namespace, expert_placement("tiny-g0", group_plan()))
    assert apply_status(definitions, stored, idle)["status"] == idle


def test_f03_status_is_not_taken_from_a_manifest(definitions: Cluster, namespace: str) -> None:
    manifest = moe_deployment() | {"status": MoEDeploymentStatus(replicas=3).to_wire()}
    assert "status" not in create(definitions, namespace, manifest)


def test_g05_scale_has_replicas_and_a_selector_also_at_zero(
    definitions: Cluster, namespace: str
) -> None:
    stored = create(definitions, namespace, moe_deployment(spec={"replicas": 0}))
    selector = f"{names.LABEL_DEPLOYMENT}=tiny,{names.LABEL_SCALE_UNIT}=true"
    apply_status(definitions, stored, MoEDeploymentStatus(selector=selector).to_wire())
    scale_path = f"{collection(namespace, names.DEPLOYMENT_KIND)}/tiny/scale"
    scale = definitions.api.get(scale_path)
    # Go leaves a zero out of a Scale; HPA reads that as zero.
    assert scale["spec"].get("replicas", 0) == 0
    assert scale["status"] == {"replicas": 0, "selector": selector}

    definitions.kubectl("scale", "-n", namespace, "moed/tiny", "--replicas=2")
    status = MoEDeploymentStatus(selector=selector, replicas=2)
    apply_status(definitions, stored, status.to_wire())
    scale = definitions.api.get(scale_path)
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (2, 2)


def test_g05_replicas_left_out_are_one_so_that_scale_can_be_read(
    definitions: Cluster, namespace: str
) -> None:
    create(definitions, namespace, moe_deployment())
    scale = definitions.api.get(f"{collection(namespace, names.DEPLOYMENT_KIND)}/tiny/scale")
    assert scale["spec"]["replicas"] == 1


def large_plan() -> GroupPlan:
    """61 layers × 288 slots on 32 ranks, with fractions and the plan in force beside it."""
    plan = group_plan(num_layers=61, num_ranks=32, slots_per_rank=9, num_experts=256)
    fractions = np.random.default_rng(0).random(plan.slots().shape)
    layers = encode_layers(plan.slots(), fractions)
    assert all(layer.fractions for layer in layers)
    previous = PreviousPlacement(epoch=1, layers=layers)
    return plan.model_copy(update={"layers": layers, "previous": previous, "epoch": 2}).sealed()


def test_f02_large_plan_and_large_overlay_are_stored_and_changed(
    definitions: Cluster, namespace: str
) -> None:
    plan = large_plan()
    assert len(json.dumps(plan.to_wire())) < MAX_STORED_BYTES
    stored = create(definitions, namespace, expert_placement("tiny-g0", plan))
    newer = plan.model_copy(update={"epoch": 3}).sealed()
    changed = apply(definitions, expert_placement("tiny-g0", newer, namespace))
    assert changed["spec"] == newer.to_wire()
    assert GroupPlan.model_validate(changed["spec"]).content_hash() == newer.hash
    assert "annotations" not in stored["metadata"] | changed["metadata"]

    overlay = {"spec": {"padding": {f"key-{i}": "x" * 1000 for i in range(100)}}}
    manifest = moe_deployment(spec={"worker": {"podTemplate": overlay}})
    deployment = create(definitions, namespace, manifest)
    deployment = apply_status(definitions, deployment, MoEDeploymentStatus(replicas=1).to_wire())
    assert deployment["spec"]["worker"]["podTemplate"] == overlay
    assert "annotations" not in deployment["metadata"]


def test_columns_show_what_users_look_for(definitions: Cluster, namespace: str) -> None:
    status = sample(status_schema(deployment_crd()))
    status["conditions"] = [
        status["conditions"][0] | {"type": "Ready", "reason": "AllGroupsServing"},
        status["conditions"][0] | {"type": "ExpertsCovered", "status": "True"},
    ]
    apply_status(definitions, create(definitions, namespace, moe_deployment()), status)
    header, row = definitions.kubectl("get", "moed", "-n", namespace, "-o", "wide").splitlines()
    assert header.split() == [
        "NAME", "READY", "RANKS", "MODEL", "IMBALANCE", "COVERED", "REASON", "AGE", "EPOCH",
        "DECISION",
    ]  # fmt: skip
    assert row.split()[3:7] == ["file:///models/tiny-moe", "1.375", "True", "AllGroupsServing"]

    stored = create(definitions, namespace, expert_placement("tiny-g0", group_plan(epoch=4)))
    apply_status(definitions, stored, sample(status_schema(placement_crd())))
    header, row = definitions.kubectl("get", "xp", "-n", namespace).splitlines()
    assert header.split() == [
        "NAME", "GENERATION", "EPOCH", "APPLIED", "PHASE", "BEFORE", "PREDICTED", "IMBALANCE",
        "MOVES", "BYTES", "STALL", "AGE",
    ]  # fmt: skip
    assert row.split()[1:3] == ["1", "4"]
    assert "1.375" in row


def test_short_names_category_and_explain_work(definitions: Cluster) -> None:
    kinds = definitions.kubectl("api-resources", "--categories=moe", "-o", "name").split()
    assert sorted(kinds) == [
        f"{names.PLACEMENT_PLURAL}.{names.API_GROUP}",
        f"{names.DEPLOYMENT_PLURAL}.{names.API_GROUP}",
    ]
    said = definitions.kubectl("explain", "moed.spec.parallelism.expert")
    assert "Expert-parallel width" in said
