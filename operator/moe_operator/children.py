"""Everything a MoEDeployment owns besides its pods: secret, config, service, budgets, plans.

Pure builders of manifests in the form that is applied; every one carries the owner's reference, so
the garbage collector removes it with the owner. Neighbour: `reconcile` applies them.
"""

from __future__ import annotations

from moe_api import names
from moe_api.plan import GroupPlan
from moe_api.worker import WorkerConfig
from moe_operator.pod_manifest import Manifest, Owner


def control_secret(owner: Owner, token: str) -> Manifest:
    """Created once, never changed: its token opens the control API of all workers."""
    return {
        **_head(owner, "v1", "Secret", names.control_secret_name(owner.name, owner.uid), "control"),
        "type": "Opaque",
        "immutable": True,
        "stringData": {names.CONTROL_TOKEN_FILE: token},
    }


def config_map(owner: Owner, config: WorkerConfig) -> Manifest:
    return {
        **_head(owner, "v1", "ConfigMap", names.config_name(owner.name), "config"),
        "data": {names.CONFIG_FILE: config.to_json()},
    }


def service(owner: Owner) -> Manifest:
    """The OpenAI API of all ready workers; control and exchange ports are not part of it."""
    port = {
        "name": "http", "port": names.HTTP_PORT, "targetPort": names.HTTP_PORT, "protocol": "TCP",
    }  # fmt: skip
    return {
        **_head(owner, "v1", "Service", names.service_name(owner.name), "api"),
        "spec": {
            "type": "ClusterIP",
            "selector": _workers(owner),
            "ports": [port],
        },
    }


def disruption_budget(owner: Owner, group: int, min_available: int) -> Manifest:
    """An integer `minAvailable`: the other forms ask the owner's /scale, which counts groups."""
    name = names.group_name(owner.name, group)
    return {
        **_head(owner, "policy/v1", "PodDisruptionBudget", name, "budget", group),
        "spec": {
            "minAvailable": min_available,
            "selector": {"matchLabels": {**_workers(owner), names.LABEL_GROUP: str(group)}},
        },
    }


def placement(owner: Owner, plan: GroupPlan) -> Manifest:
    """The stored plan of a group: content and announcement are the same document."""
    name = names.group_name(owner.name, plan.group)
    return {
        **_head(
            owner, names.API_GROUP_VERSION, names.PLACEMENT_KIND, name, "placement", plan.group
        ),
        "spec": plan.to_wire(),
    }


def scale_selector(name: str) -> str:
    """Finds exactly one pod of each group; a valid selector also when there is none."""
    return f"{names.LABEL_DEPLOYMENT}={name},{names.LABEL_SCALE_UNIT}=true"


def service_url(namespace: str, name: str) -> str:
    return f"http://{names.service_name(name)}.{namespace}.svc:{names.HTTP_PORT}"


def _workers(owner: Owner) -> dict[str, str]:
    return {names.LABEL_DEPLOYMENT: owner.name, names.LABEL_COMPONENT: "worker"}


def _head(
    owner: Owner,
    api_version: str,
    kind: str,
    name: str,
    component: str,
    group: int | None = None,
) -> Manifest:
    labels = owner.labels(component)
    if group is not None:
        labels[names.LABEL_GROUP] = str(group)
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels,
            "ownerReferences": [owner.reference()],
        },
    }
