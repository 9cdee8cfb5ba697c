"""The pod of a member: identity, security, model, overlays; and what makes it another template."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api import names
from moe_api.deployment import MoEDeploymentSpec
from moe_api.worker import KvConfig
from moe_operator.acceptance import judge_manifest
from moe_operator.children import service
from moe_operator.pod_manifest import Incarnation, NoImage, Owner, pod_manifest, template_hash
from moe_operator.settings import WorkerDefaults
from moe_operator.worker_config import ModelSourceUnsupported, model_source, worker_config

OWNER = Owner("ns", "d", "owner-uid")
DEFAULTS = WorkerDefaults(image="default:1")
SECRET = ("d-control", "token")


def spec(**blocks: Any) -> MoEDeploymentSpec:
    return MoEDeploymentSpec.model_validate({"model": {"uri": "file:///m"}, **blocks})


def build(given: MoEDeploymentSpec, member: int = 0, defaults: WorkerDefaults = DEFAULTS):
    return pod_manifest(OWNER, given, defaults, Incarnation(1, member, "abcde", 2), SECRET)


def worker_of(pod):
    return next(c for c in pod["spec"]["containers"] if c["name"] == "worker")


def hash_of(**blocks: Any) -> str:
    return template_hash(OWNER, spec(**blocks), DEFAULTS, SECRET)


def test_a_pod_says_who_it_is():
    pod = build(spec(), member=3)
    assert pod["metadata"]["name"] == "d-g1-m3-abcde"
    labels = pod["metadata"]["labels"]
    assert (labels[names.LABEL_GROUP], labels[names.LABEL_MEMBER]) == ("1", "3")
    assert names.LABEL_SCALE_UNIT not in labels
    assert build(spec(), member=0)["metadata"]["labels"][names.LABEL_SCALE_UNIT] == "true"
    env = {e["name"]: e for e in worker_of(pod)["env"]}
    assert (env["MOE_DEPLOYMENT"]["value"], env["MOE_MEMBER"]["value"]) == ("d", "3")
    field = env["MOE_POD_IP"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "status.podIP"
    assert pod["metadata"]["annotations"] == {"moe-operator.dev/restarts": "2"}
    assert worker_of(pod)["args"] == ["serve"]
    assert "command" not in worker_of(pod)


def test_only_the_public_port_is_in_the_service():
    ports = {p["name"]: p["containerPort"] for p in worker_of(build(spec()))["ports"]}
    assert ports == {"http": 8000, "control": 8001, "exchange": 8002}
    assert [port["targetPort"] for port in service(OWNER)["spec"]["ports"]] == [8000]


def test_e07_the_grace_of_a_pod_is_its_drain_and_a_little():
    pod = build(spec(disruption={"drainSeconds": 20}))
    assert pod["spec"]["terminationGracePeriodSeconds"] == 30


def test_the_start_may_take_the_warm_up():
    pod = build(spec(failurePolicy={"warmupGraceSeconds": 601}))
    probe = worker_of(pod)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 601


def test_security_can_be_loosened_by_the_overlay_only():
    pod = build(spec())
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert worker_of(pod)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    overlay = {"spec": {"securityContext": {"runAsNonRoot": False}}}
    loose = build(spec(worker={"podTemplate": overlay}))
    assert loose["spec"]["securityContext"]["runAsNonRoot"] is False
    assert loose["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_an_accelerator_is_a_limit_and_a_request_if_there_are_any():
    resources = {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}
    pod = build(spec(worker={"accelerator": {"count": 2}, "resources": resources}))
    assert worker_of(pod)["resources"] == {
        "limits": {"cpu": "2", "nvidia.com/gpu": 2},
        "requests": {"cpu": "1", "nvidia.com/gpu": 2},
    }
    assert worker_config("d", spec(worker={"accelerator": {}})).device == "cuda"


def test_every_field_of_the_cache_reaches_the_worker() -> None:
    kv_cache = {
        "dtype": "k8v4",
        "encoding": "FourOverSix",
        "keyScaling": "Channel",
        "scalesFile": "kv/scales.json",
        "blockSize": 32,
        "memoryFraction": 0.5,
        "prefixCaching": False,
    }
    config = worker_config("d", spec(kvCache=kv_cache))
    assert config.kv.to_wire() == kv_cache
    assert worker_config("d", spec()).kv == KvConfig()


def test_how_the_model_is_computed_reaches_the_worker() -> None:
    config = worker_config("d", spec(worker={"batchInvariant": False, "kernels": "reference"}))
    assert (config.batch_invariant, config.kernels) == (False, "reference")
    usual = worker_config("d", spec())
    assert (usual.batch_invariant, usual.kernels) == (True, "auto")
    assert hash_of(worker={"batchInvariant": False}) != hash_of()


def test_kernels_are_kept_in_a_folder_that_a_mount_of_the_user_replaces() -> None:
    usual = worker_of(build(spec()))
    env = {e["name"]: e.get("value") for e in usual["env"]}
    [mount] = [m for m in usual["volumeMounts"] if m["mountPath"] == env["MOE_KERNELS_CACHE"]]
    assert "readOnly" not in mount
    shared = {"name": "shared", "hostPath": {"path": "/var/lib/kernels"}}
    overlay = {"spec": {"volumes": [shared], "containers": [
        {"name": "worker", "volumeMounts": [{"name": "shared", "mountPath": mount["mountPath"]}]}
    ]}}  # fmt: skip
    pod = build(spec(worker={"podTemplate": overlay}))
    mounts = {m["mountPath"]: m["name"] for m in worker_of(pod)["volumeMounts"]}
    assert mounts[mount["mountPath"]] == "shared"
    assert shared in pod["spec"]["volumes"]


def test_later_overlays_win():
    operator_wide = {
        "metadata": {"labels": {"team": "ops"}},
        "spec": {
            "containers": [{"name": "worker", "image": "wide:1",
                            "env": [{"name": "A", "value": "wide"}]}],
            "priorityClassName": "wide",
        },
    }  # fmt: skip
    defaults = WorkerDefaults(image="default:1", pod_template=operator_wide)
    assert worker_of(build(spec(), defaults=defaults))["image"] == "wide:1"
    wish = {"image": "mine:1", "env": [{"name": "A", "value": "mine"}],
            "podTemplate": {"spec": {"priorityClassName": "mine"}}}  # fmt: skip
    pod = build(spec(worker=wish), defaults=defaults)
    assert worker_of(pod)["image"] == "mine:1"
    assert next(e for e in worker_of(pod)["env"] if e["name"] == "A")["value"] == "mine"
    assert pod["spec"]["priorityClassName"] == "mine"
    assert pod["metadata"]["labels"]["team"] == "ops"


def test_without_any_image_the_spec_is_refused():
    with pytest.raises(NoImage):
        build(spec(), defaults=WorkerDefaults())
    manifest = {"metadata": {"name": "d"}, "spec": {"model": {"uri": "file:///m"}}}
    _, verdict = judge_manifest(manifest, WorkerDefaults())
    assert verdict.reason == "InvalidSpec"
    assert "set spec.worker.image" in verdict.message


@pytest.mark.parametrize(
    ("uri", "path", "claim"),
    [
        ("file:///models/a", "/models/a", None),
        ("pvc://claim/a/b", "/models/a/b", "claim"),
        ("pvc://claim", "/models", "claim"),
    ],
)
def test_where_the_model_is(uri, path, claim):
    assert model_source(uri).path == path
    assert model_source(uri).claim == claim


def test_other_sources_name_the_ways_that_work():
    with pytest.raises(ModelSourceUnsupported, match="use file:///path"):
        model_source("hf://org/name")


@pytest.mark.parametrize(
    "blocks",
    [
        {"replicas": 5},
        {"paused": True},
        {"rebalancing": {"mode": "Off"}},
        {"topology": {"levels": [{"name": "rack", "nodeLabel": "example.com/rack"}]}},
        {"disruption": {"drainSeconds": 5, "pdb": "None"}},
        {"failurePolicy": {"warmupGraceSeconds": 60, "maxRestarts": 1}},
        {"autoscaling": {"mode": "External"}},
    ],
)
def test_policies_do_not_roll_pods(blocks):
    assert hash_of(**blocks) == hash_of()


@pytest.mark.parametrize(
    "blocks",
    [
        {"worker": {"image": "other:1"}},
        {"worker": {"env": [{"name": "A", "value": "1"}]}},
        {"worker": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}},
        {"worker": {"resources": {"limits": {"cpu": "1"}}}},
        {"model": {"uri": "file:///other"}},
        {"model": {"uri": "file:///m", "servedName": "x"}},
        {"parallelism": {"expert": 2}},
        {"experts": {"spareSlotsPerRank": 2}},
        {"kvCache": {"dtype": "bf16"}},
        {"scheduler": {"maxRunning": 8}},
        {"api": {"maxBodyBytes": 2048}},
    ],
)
def test_what_pods_and_workers_read_rolls_them(blocks):
    assert hash_of(**blocks) != hash_of()


def test_f07_a_long_name_fits_everywhere():
    """F07: derived names are cut in one place, and two long names stay different."""
    twins = ["a" * 38 + suffix for suffix in ("-x", "-y")]
    pods = []
    for name in twins:
        owner = Owner("ns", name, "uid")
        incarnation = Incarnation(63, 1023, "abcde")
        pods.append(pod_manifest(owner, spec(), DEFAULTS, incarnation, SECRET))
    for pod in pods:
        assert len(pod["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())
    assert pods[0]["metadata"]["name"] != pods[1]["metadata"]["name"]


def test_the_key_of_the_public_api_is_mounted_where_the_worker_is_told_to_look():
    api = {"keySecretRef": {"name": "keys", "key": "current"}, "maxChoices": 3}
    pod = build(spec(api=api))
    [volume] = [v for v in pod["spec"]["volumes"] if v["name"] == "moe-api-key"]
    items = [{"key": "current", "path": "key"}]
    assert volume["secret"] == {"secretName": "keys", "items": items}
    [mount] = [m for m in worker_of(pod)["volumeMounts"] if m["name"] == "moe-api-key"]
    config = worker_config("d", spec(api=api))
    assert config.api.key_file == f"{mount['mountPath']}/key"
    assert config.api.max_choices == 3
    assert worker_config("d", spec()).api.key_file is None
    assert hash_of(api=api) != hash_of()
