"""A deployment's life on a real API server: formed, scaled, rolled out, paused, deleted."""

from __future__ import annotations

import json
from typing import Any

import pytest

from devcluster.waiting import wait_until
from moe_api import names
from moe_api.worker import WorkerConfig, WorkerPhase
from tests.support.fake_workers import FakeWorker
from tests.support.reconcile_world import World

pytestmark = pytest.mark.apiserver
THREE: dict[str, Any] = {"parallelism": {"expert": 3}}


def no_experts(worker: FakeWorker) -> None:
    worker.phase, worker.shape = WorkerPhase.FAILED, None
    worker.error_reason = "ModelHasNoExperts"
    worker.last_error = "config.json has no num_local_experts"


@pytest.mark.parametrize("forgetful", [False, True])
def test_apply_forms_a_group_and_becomes_ready(world: World, forgetful: bool):
    """Also when the operator forgets everything between any two passes."""
    world.forgetful = forgetful
    world.create(**THREE)
    world.converge(world.is_ready)
    status = world.status()
    assert (status.ready, status.ranks.summary, status.replicas) == ("1/1", "3/3", 1)
    assert (status.ready_replicas, status.updated_replicas) == (1, 1)
    assert status.model is not None
    assert status.model.experts == 6
    assert status.survives_rank_loss is True
    assert status.url == f"http://d.{world.namespace}.svc:8000"
    assert world.condition("Accepted") == ("True", "Valid")
    assert world.condition("SpecHonoured") == ("True", "Complete")
    assert world.condition("Progressing") == ("False", "Complete")
    assert world.condition("ExpertsCovered") == ("True", "SingleCopy")
    assert world.condition("Degraded") == ("False", "Healthy")
    assert world.condition("TopologySatisfied") == ("True", "Packed")
    assert world.condition("ScalingActive") == ("False", "Disabled")
    placement = world.placement()
    assert placement is not None
    assert (placement["spec"]["generation"], placement["spec"]["epoch"]) == (1, 1)
    assert [m["id"] for m in placement["spec"]["members"]] == [0, 1, 2]
    assert (placement["status"]["appliedEpoch"], placement["status"]["phase"]) == (1, "Applied")


def test_what_a_deployment_owns(world: World):
    world.create(**THREE, kvCache={"dtype": "bf16"})
    world.converge(world.is_ready)
    owner = world.get()["metadata"]
    config = world.child("configmaps", "d-config")
    assert config is not None
    told = WorkerConfig.from_json(config["data"]["worker.json"])
    assert (told.model.path, told.model.served_name, told.kv.dtype) == ("/models/tiny", "d", "bf16")
    service = world.child("services", "d")
    assert service is not None
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    children = [config, service, world.secret(), world.placement()]
    for child in [*children, *world.pods()]:
        assert child is not None
        [reference] = child["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["controller"]) == (owner["uid"], True)
    assert "annotations" not in owner
    assert "finalizers" not in owner


def test_worker_pods_keep_to_the_restricted_standard(world: World):
    """H02: admitted where only restricted pods are; no token of the cluster in them."""
    world.api.patch(
        f"/api/v1/namespaces/{world.namespace}",
        {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}},
    )
    world.create(**THREE)
    world.converge(world.is_ready)
    for pod in world.pods():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["restartPolicy"] == "Never"
        assert spec["terminationGracePeriodSeconds"] == 70
        assert not [v for v in spec["volumes"] if "projected" in v]


def test_g05_the_scale_selector_finds_one_pod_of_each_group(world: World):
    """G05: a valid selector from the first pass on, also at 0 replicas."""
    world.create(replicas=0, **THREE)
    world.one_pass()
    scale = f"/apis/{names.API_GROUP_VERSION}/namespaces/{world.namespace}/moedeployments/d/scale"
    found = world.api.get(scale)
    assert found["status"]["replicas"] == 0
    selector = found["status"]["selector"]
    assert selector
    assert world.condition("Ready") == ("True", "ScaledToZero")
    assert world.status().ready == "0/0"
    world.edit({"replicas": 2})
    world.converge(world.is_ready)
    assert world.api.get(scale)["status"] == {"replicas": 2, "selector": selector}
    query = selector.replace("=", "%3D").replace(",", "%2C")
    matched = world.api.get(f"/api/v1/namespaces/{world.namespace}/pods?labelSelector={query}")
    groups = [pod["metadata"]["labels"][names.LABEL_GROUP] for pod in matched["items"]]
    assert sorted(groups) == ["0", "1"]


def test_scaling_up_and_down_leaves_the_first_group_alone(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    first = world.uids(0)
    fence = world.placement()["spec"]["epoch"]  # type: ignore[index]
    world.edit({"replicas": 2})
    world.one_pass()
    world.one_pass()
    assert world.condition("Progressing") == ("True", "ScalingUp")
    world.converge(world.is_ready)
    assert world.status().ready == "2/2"
    world.worker(0, group=1).running = 1
    world.edit({"replicas": 1})
    world.converge(lambda: world.worker(0, group=1).phase is WorkerPhase.DRAINING)
    assert len(world.pods(1)) == 3, "one of them still has a request"
    assert world.condition("Progressing") == ("True", "ScalingDown")
    world.worker(0, group=1).running = 0
    world.converge(lambda: not world.pods(1) and world.placement(1) is None)
    world.converge(lambda: world.status().replicas == 1 and world.is_ready())
    assert world.uids(0) == first
    assert world.placement()["spec"]["epoch"] == fence  # type: ignore[index]


def test_policies_never_touch_a_pod(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    before = world.uids()
    world.edit(
        {
            "disruption": {"drainSeconds": 5},
            "failurePolicy": {"warmupGraceSeconds": 900},
            "rebalancing": {"mode": "Off", "intervalSeconds": 7},
            "topology": {"levels": [{"name": "host", "nodeLabel": "kubernetes.io/hostname"}]},
        }
    )
    for _ in range(4):
        world.one_pass()
    assert world.uids() == before
    assert world.status().observed_generation == 2


def test_another_image_replaces_every_pod_of_one_group_after_the_other(world: World):
    world.create(**THREE, replicas=2, worker={"image": "worker:1"})
    world.converge(world.is_ready)
    before = {group: set(world.uids(group)) for group in (0, 1)}
    world.edit({"worker": {"image": "worker:2"}})
    world.one_pass()
    assert world.condition("Progressing") == ("True", "RollingOut")
    assert set(world.uids(1)) == before[1], "the second group serves while the first is rolled"
    world.converge(lambda: world.status().updated_replicas == 2 and world.is_ready())
    for group in (0, 1):
        assert not set(world.uids(group)) & before[group]
    assert {pod["spec"]["containers"][0]["image"] for pod in world.pods()} == {"worker:2"}
    assert world.placement()["spec"]["generation"] == 2  # type: ignore[index]


def test_another_width_recreates_the_group_and_says_so(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.edit({"parallelism": {"expert": 2}})
    world.one_pass()
    [progressing] = [c for c in world.status().conditions if c.type == "Progressing"]
    assert "parallelism.expert changes from 3 to 2" in progressing.message
    world.converge(world.is_ready)
    assert world.status().ranks.summary == "2/2"
    assert len(world.pods()) == 2


def test_a09_a_model_without_experts_leaves_no_pod(world: World):
    """A09: no group is formed, its pods go, and none is made until the spec changes."""
    world.shape_workers = no_experts
    world.create(**THREE)
    world.converge(lambda: world.condition("Accepted")[1] == "ModelHasNoExperts")
    world.converge(lambda: not world.pods())
    world.restart_operator()
    for _ in range(3):
        world.one_pass()
    assert world.pods() == []
    assert world.placement() is None
    assert world.condition("Accepted") == ("False", "ModelHasNoExperts")
    assert world.condition("Ready") == ("False", "InvalidSpec")
    assert "ModelLoadFailed" in [reason for reason, _ in world.events]
    world.shape_workers = lambda worker: None
    world.edit({"model": {"uri": "file:///models/other"}})
    world.converge(world.is_ready)


def test_too_few_slots_for_the_model_leave_no_pod(world: World):
    world.create(**THREE, experts={"slotsPerRank": 1})
    world.converge(lambda: world.condition("Accepted")[1] == "InsufficientSlots")
    world.converge(lambda: not world.pods())
    [accepted] = [c for c in world.status().conditions if c.type == "Accepted"]
    assert "set it to 2 or more" in accepted.message


def test_a01_counts_that_do_not_divide_make_a_valid_plan_and_are_told(world: World):
    """The case's proportions: six experts on five ranks, one slot more than that divides."""
    world.create(parallelism={"expert": 5}, experts={"slotsPerRank": 2})
    world.converge(world.is_ready)
    [accepted] = [c for c in world.status().conditions if c.type == "Accepted"]
    assert accepted.message.endswith(
        "2 slots on each of 5 ranks, 6 for one copy of each expert and 4 for more copies"
    )
    for layer in world.placement()["spec"]["layers"]:  # type: ignore[index]
        ranks = [row.split(",") for row in layer["slots"].split(";")]
        assert sorted(e for row in ranks for e in row if e != "-1") == list("012345")
        assert max(len([e for e in row if e != "-1"]) for row in ranks) <= 2
    assert world.status().placement.min_copies == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("uri", ["hf://org/name", "s3://bucket/model"])
def test_an_unsupported_model_source_makes_no_pod(world: World, uri: str):
    world.create(model={"uri": uri}, **THREE)
    world.one_pass()
    assert world.condition("Accepted") == ("False", "ModelSourceUnsupported")
    assert world.pods() == []
    world.edit({"model": {"uri": "pvc://claim/sub"}})
    world.converge(world.is_ready)
    volumes = world.pods()[0]["spec"]["volumes"]
    [claim] = [v["persistentVolumeClaim"] for v in volumes if "persistentVolumeClaim" in v]
    assert claim == {"claimName": "claim", "readOnly": True}


def test_a_reserved_key_in_the_overlay_is_refused_by_name(world: World):
    world.create(**THREE, worker={"podTemplate": {"spec": {"restartPolicy": "Always"}}})
    world.one_pass()
    assert world.condition("Accepted") == ("False", "InvalidSpec")
    assert world.condition("Ready") == ("False", "InvalidSpec")
    [accepted] = [c for c in world.status().conditions if c.type == "Accepted"]
    assert "spec.worker.podTemplate.spec.restartPolicy" in accepted.message
    assert world.pods() == []


def test_a_field_that_is_not_acted_on_is_named(world: World):
    world.create(**THREE, router={"capacityFactor": 1.5})
    world.converge(world.is_ready)
    assert world.condition("SpecHonoured") == ("False", "FieldsIgnored")
    [honoured] = [c for c in world.status().conditions if c.type == "SpecHonoured"]
    assert "spec.router.capacityFactor" in honoured.message


def test_paused_freezes_what_the_operator_does(world: World):
    world.create(**THREE, paused=True)
    for _ in range(3):
        world.one_pass()
    assert world.pods() == []
    assert world.condition("Ready") == ("False", "Paused")
    world.edit({"paused": False})
    world.converge(world.is_ready)
    world.edit({"paused": True})
    world.delete_pod(1)
    for _ in range(3):
        world.one_pass()
    assert len(world.pods()) == 2
    assert world.placement()["spec"]["generation"] == 1  # type: ignore[index]
    assert world.condition("Ready") == ("False", "Paused")
    world.edit({"paused": False})
    world.converge(world.is_ready)


def test_deleting_the_deployment_removes_everything_without_the_operator(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.delete(names.DEPLOYMENT_PLURAL, "d")

    def nothing_left() -> bool:
        kinds = [world.child("configmaps", "d-config"), world.secret(),
                 world.child("services", "d"), world.placement()]  # fmt: skip
        return not world.pods() and not any(kinds)

    wait_until(nothing_left, 30, "garbage collection")
    assert world.one_pass().requeue_after_seconds is None


def test_a_child_that_was_removed_or_edited_is_put_right(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.delete("services", "d")
    world.api.patch(
        f"/api/v1/namespaces/{world.namespace}/configmaps/d-config", {"data": {"worker.json": "{}"}}
    )
    world.now += 60
    world.one_pass()
    assert world.child("services", "d") is not None
    config = world.child("configmaps", "d-config")
    assert config is not None
    assert json.loads(config["data"]["worker.json"])["model"]["path"] == "/models/tiny"


def test_foreign_keys_on_children_are_kept(world: World):
    """G08: other controllers may label what is ours."""
    world.create(**THREE)
    world.converge(world.is_ready)
    path = f"/api/v1/namespaces/{world.namespace}/services/d"
    world.api.patch(path, {"metadata": {"labels": {"team": "a"}, "annotations": {"x/y": "z"}}})
    world.now += 60
    world.one_pass()
    metadata = world.api.get(path)["metadata"]
    assert (metadata["labels"]["team"], metadata["annotations"]["x/y"]) == ("a", "z")


def test_the_status_is_written_only_on_change(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    for _ in range(3):
        world.one_pass()
    before = world.get()["metadata"]["resourceVersion"], world.placement()["metadata"]
    for _ in range(5):
        world.one_pass()
    after = world.get()["metadata"]["resourceVersion"], world.placement()["metadata"]
    assert after == before
