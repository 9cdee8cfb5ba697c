"""Keys of worker.podTemplate that stay the operator's, and those that are users'."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api.pod_template import pod_template_faults, reserved_pod_template_keys


def worker(**keys: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "worker", **keys}]}}


@pytest.mark.parametrize(
    ("overlay", "path"),
    [
        ({"apiVersion": "v1"}, "apiVersion"),
        ({"metadata": {"name": "x"}}, "metadata.name"),
        ({"metadata": {"labels": "x"}}, "metadata.labels"),
        (
            {"metadata": {"labels": {"moe-operator.dev/group": "1"}}},
            "metadata.labels[moe-operator.dev/group]",
        ),
        (
            {"metadata": {"labels": {"app.kubernetes.io/name": "x"}}},
            "metadata.labels[app.kubernetes.io/name]",
        ),
        ({"spec": []}, None),
        ({"spec": "x"}, "spec"),
        ({"spec": {"restartPolicy": "Always"}}, "spec.restartPolicy"),
        ({"spec": {"automountServiceAccountToken": True}}, "spec.automountServiceAccountToken"),
        ({"spec": {"terminationGracePeriodSeconds": 1}}, "spec.terminationGracePeriodSeconds"),
        ({"spec": {"volumes": [{"name": "moe-config"}]}}, "spec.volumes[moe-config]"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, "spec.volumes[0]"),
        ({"spec": {"containers": {"worker": {}}}}, "spec.containers"),
        ({"spec": {"containers": [{"image": "x"}]}}, "spec.containers[0]"),
        ({"spec": {"initContainers": [{"name": "worker"}]}}, "spec.initContainers[worker]"),
        (worker(args=["x"]), "spec.containers[worker].args"),
        (worker(env=None), "spec.containers[worker].env"),
        (
            worker(env=[{"name": "MOE_GROUP", "value": "1"}]),
            "spec.containers[worker].env[MOE_GROUP]",
        ),
        ({"spec": {"containers": None}}, "spec.containers"),
        (worker(ports=[]), "spec.containers[worker].ports"),
        (worker(readinessProbe={}), "spec.containers[worker].readinessProbe"),
        (worker(livenessProbe={}), "spec.containers[worker].livenessProbe"),
        (worker(startupProbe={}), "spec.containers[worker].startupProbe"),
        (worker(lifecycle={}), "spec.containers[worker].lifecycle"),
        (worker(resources={"limits": {}}), "spec.containers[worker].resources.limits"),
        (
            worker(volumeMounts=[{"mountPath": "/etc/moe/config", "name": "v"}]),
            "spec.containers[worker].volumeMounts[/etc/moe/config]",
        ),
        (worker(volumeMounts=[{"name": "v"}]), "spec.containers[worker].volumeMounts[0]"),
    ],
)
def test_reserved_key_is_found(overlay: dict[str, Any], path: str | None) -> None:
    assert reserved_pod_template_keys(overlay) == ([path] if path else [])


def test_what_users_need_is_free() -> None:
    overlay = {
        "metadata": {"labels": {"team": "a"}, "annotations": {"example.org/a": "b"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "serviceAccountName": "reader",
            "imagePullSecrets": [{"name": "pull"}],
            "volumes": [{"name": "host-usr", "hostPath": {"path": "/usr"}}],
            "containers": [
                {
                    "name": "worker",
                    "command": ["python", "-m", "moe_worker"],
                    "image": "example.org/worker:2",
                    "env": [{"name": "PATH", "value": "/usr/bin"}],
                    "resources": {"claims": [{"name": "gpu"}]},
                    "volumeMounts": [
                        {"name": "host-usr", "mountPath": "/usr"},
                        {"name": "host-usr", "mountPath": "/etc/moe-like"},
                    ],
                },
                {"name": "sidecar", "image": "x", "args": ["y"]},
            ],
        },
    }
    assert reserved_pod_template_keys(overlay) == []


def test_fault_names_field_and_way_out() -> None:
    assert pod_template_faults(worker(args=["serve"])) == [
        "spec.worker.podTemplate.spec.containers[worker].args is not yours to set: "
        "the operator tells the worker what to do, remove it"
    ]
