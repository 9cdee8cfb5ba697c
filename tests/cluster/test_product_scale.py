"""`replicas` and `/scale`: groups come and go whole, and nobody else notices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from devcluster.cluster import Cluster
from moe_api import names
from tests.support.product import Deployment

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def moe(installed: Cluster, module_namespace: str) -> Iterator[Deployment]:
    made = Deployment(installed, module_namespace, "scale")
    made.apply(replicas=0, parallelism={"expert": 1})
    yield made
    made.kubectl("delete", "moed", made.name, "--wait=false")


def scale(moe: Deployment) -> dict[str, Any]:
    path = (
        f"/apis/{names.API_GROUP_VERSION}/namespaces/{moe.namespace}/"
        f"{names.DEPLOYMENT_PLURAL}/{moe.name}/scale"
    )
    found: dict[str, Any] = moe.cluster.api.get(path)
    return found


def test_no_replicas_is_ready_and_has_a_selector(moe: Deployment) -> None:
    moe.wait(lambda: moe.condition("Ready") == ("True", "ScaledToZero"), "zero groups")
    assert moe.status["ready"] == "0/0"
    assert moe.pods() == []
    assert names.LABEL_SCALE_UNIT in scale(moe)["status"]["selector"]


def test_g05_one_two_one_touches_no_other_group(moe: Deployment) -> None:
    moe.kubectl("scale", "moed", moe.name, "--replicas=1")
    moe.wait(lambda: moe.status.get("ready") == "1/1", "one group")
    first = moe.uids(0)
    moe.kubectl("scale", "moed", moe.name, "--replicas=2")
    moe.wait(lambda: moe.status.get("ready") == "2/2", "two groups")
    assert moe.uids(0) == first
    status = scale(moe)["status"]
    assert status["replicas"] == 2
    found = moe.kubectl("get", "pods", "-l", status["selector"], "-o", "json")
    groups = [pod["metadata"]["labels"][names.LABEL_GROUP] for pod in json.loads(found)["items"]]
    assert sorted(groups) == ["0", "1"], "exactly one pod per group"
    moe.kubectl("scale", "moed", moe.name, "--replicas=1")
    moe.wait(lambda: not moe.uids(1) and moe.status.get("ready") == "1/1", "one group again")
    assert moe.uids(0) == first
    moe.wait(lambda: not moe.placement(1), "the plan of the group that went is gone too")


def test_g05_an_autoscaler_can_scale_it(moe: Deployment) -> None:
    autoscaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": moe.name, "namespace": moe.namespace},
        "spec": {
            "minReplicas": 1,
            "maxReplicas": 2,
            "scaleTargetRef": {
                "apiVersion": names.API_GROUP_VERSION,
                "kind": names.DEPLOYMENT_KIND,
                "name": moe.name,
            },
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu", "target": {"type": "Utilization", "averageUtilization": 80}
                    },
                }
            ],
        },
    }  # fmt: skip
    moe.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(autoscaler))

    def able() -> bool:
        conditions = moe.get("hpa", moe.name).get("status", {}).get("conditions", [])
        found = {c["type"]: (c["status"], c["reason"]) for c in conditions}
        # Without a metrics server there is nothing to scale by; the target itself must be fine.
        return found.get("AbleToScale", ("", ""))[0] == "True" and found.get(
            "ScalingActive", ("", "")
        )[1] in ("FailedGetResourceMetric", "ValidMetricFound")

    moe.wait(able, "the autoscaler to find selector and scale", 60)
    moe.kubectl("delete", "hpa", moe.name)
