"""The worker pod: what the operator makes, what overlays add, and the hash that tells a change.

Pure. Later wins: what is built here, then the operator-wide overlay of the settings, then image,
variables and resources of the spec, then `spec.worker.podTemplate`, then the pod's identity. The
hash covers whatever needs a new pod to take effect and nothing else: a policy (replicas, draining,
failures, topology) changes running pods never, so it is left at its default while hashing.
Neighbours: `worker_config` (the mounted file, part of the hash), `overlay` (the merge), `children`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from moe_api import names
from moe_api.deployment import MoEDeploymentSpec
from moe_api.policy import Disruption, FailurePolicy
from moe_operator.overlay import merge
from moe_operator.pods import ANNOTATION_RESTARTS
from moe_operator.settings import WorkerDefaults
from moe_operator.worker_config import MODEL_MOUNT_DIR, model_source, worker_config

EXIT_SECONDS = 10
"""What a pod gets beyond its drain to close and exit."""
SHM_LIMIT = "1Gi"
KERNELS_LIMIT = "1Gi"
"""Kernels take some megabytes for each build and kind of processor."""
PROBE_SECONDS = 2
Manifest = dict[str, Any]


class NoImage(ValueError):
    """Neither the spec nor the operator's settings name a worker image."""

    def __init__(self) -> None:
        super().__init__(
            "spec.worker.image is not set and the operator was installed without a default: "
            "set spec.worker.image"
        )


@dataclass(frozen=True)
class Owner:
    """The MoEDeployment that owns everything made here."""

    namespace: str
    name: str
    uid: str

    def reference(self) -> Manifest:
        return {
            "apiVersion": names.API_GROUP_VERSION,
            "kind": names.DEPLOYMENT_KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": False,
        }

    def labels(self, component: str) -> dict[str, str]:
        return {
            names.LABEL_NAME: "moe-worker",
            names.LABEL_INSTANCE: self.name,
            names.LABEL_COMPONENT: component,
            names.LABEL_PART_OF: "moe-operator",
            names.LABEL_MANAGED_BY: "moe-operator",
            names.LABEL_DEPLOYMENT: self.name,
        }


@dataclass(frozen=True)
class Incarnation:
    """Which member of which group a pod is, for the how-manieth time."""

    group: int
    member: int
    suffix: str
    restarts: int = 0
    """Failures in a row of the incarnations before."""


def pod_manifest(
    owner: Owner,
    spec: MoEDeploymentSpec,
    defaults: WorkerDefaults,
    incarnation: Incarnation,
    token_secret: tuple[str, str],
) -> Manifest:
    """The pod of one incarnation, ready to be created.

    Args:
        token_secret: name and key of the Secret with the control token.

    Raises:
        NoImage, ModelSourceUnsupported: the spec cannot be turned into a pod.
    """
    identity = {
        "metadata": {
            "name": names.pod_name(
                owner.name, incarnation.group, incarnation.member, incarnation.suffix
            ),
            "labels": {
                names.LABEL_GROUP: str(incarnation.group),
                names.LABEL_MEMBER: str(incarnation.member),
                names.LABEL_TEMPLATE_HASH: template_hash(owner, spec, defaults, token_secret),
                # Exactly one pod of a group: what `/scale` finds, so that averages are per group.
                **({names.LABEL_SCALE_UNIT: "true"} if incarnation.member == 0 else {}),
            },
            "annotations": {ANNOTATION_RESTARTS: str(incarnation.restarts)},
        },
        "spec": {
            "containers": [
                {
                    "name": names.WORKER_CONTAINER,
                    "env": [
                        {"name": names.ENV_GROUP, "value": str(incarnation.group)},
                        {"name": names.ENV_MEMBER, "value": str(incarnation.member)},
                    ],
                }
            ]
        },
    }
    return merge(_shared(owner, spec, defaults, token_secret), identity)


def template_hash(
    owner: Owner,
    spec: MoEDeploymentSpec,
    defaults: WorkerDefaults,
    token_secret: tuple[str, str],
) -> str:
    """Ten hex digits over what a running pod cannot take over: pod, WorkerConfig, width, slots."""
    lasting = spec.model_copy(
        update={"disruption": Disruption(), "failure_policy": FailurePolicy()}
    )
    pod = _shared(owner, lasting, defaults, token_secret)
    content = {
        "labels": pod["metadata"]["labels"],
        "annotations": pod["metadata"].get("annotations", {}),
        "pod": pod["spec"],
        "config": worker_config(owner.name, lasting).to_wire(),
        "width": spec.parallelism.expert,
        "experts": spec.experts.to_wire(),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def check_image(spec: MoEDeploymentSpec, defaults: WorkerDefaults) -> None:
    """Raises NoImage: neither spec, overlays nor settings name one."""
    _shared(Owner("", "", ""), spec, defaults, ("", ""))


def _shared(
    owner: Owner,
    spec: MoEDeploymentSpec,
    defaults: WorkerDefaults,
    token_secret: tuple[str, str],
) -> Manifest:
    """What all pods of the deployment have in common, overlays put on."""
    pod = _base(owner, spec, defaults, token_secret)
    for overlay in (defaults.pod_template, _wishes(spec), spec.worker.pod_template):
        pod = merge(pod, overlay)
    if not _worker(pod).get("image"):
        raise NoImage
    return pod


def _worker(pod: Manifest) -> Manifest:
    worker: Manifest = next(
        c for c in pod["spec"]["containers"] if c["name"] == names.WORKER_CONTAINER
    )
    return worker


def _wishes(spec: MoEDeploymentSpec) -> Manifest:
    """Fields of the spec that speak of the container, as an overlay."""
    container: Manifest = {
        "name": names.WORKER_CONTAINER,
        "env": [variable.to_wire() for variable in spec.worker.env],
        "resources": _resources(spec),
    }
    if spec.worker.image is not None:
        container["image"] = spec.worker.image
    return {"spec": {"containers": [container]}}


def _base(
    owner: Owner,
    spec: MoEDeploymentSpec,
    defaults: WorkerDefaults,
    token_secret: tuple[str, str],
) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": owner.namespace,
            "labels": owner.labels("worker"),
            "ownerReferences": [owner.reference()],
        },
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": spec.disruption.drain_seconds + EXIT_SECONDS,
            "securityContext": {
                "runAsNonRoot": True,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "imagePullSecrets": [{"name": name} for name in defaults.image_pull_secrets],
            "containers": [_container(owner, spec, defaults)],
            "volumes": _volumes(owner, spec, token_secret),
        },
    }


def _container(owner: Owner, spec: MoEDeploymentSpec, defaults: WorkerDefaults) -> Manifest:
    return {
        "name": names.WORKER_CONTAINER,
        "image": defaults.image,
        "imagePullPolicy": defaults.image_pull_policy,
        "args": ["serve"],
        "env": _env(owner),
        "ports": [
            {"name": "http", "containerPort": names.HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": names.CONTROL_PORT, "protocol": "TCP"},
            {"name": "exchange", "containerPort": names.EXCHANGE_PORT, "protocol": "TCP"},
        ],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
        **_probes(spec),
    }


def _env(owner: Owner) -> list[Manifest]:
    from_pod = {
        names.ENV_NAMESPACE: "metadata.namespace",
        names.ENV_POD_NAME: "metadata.name",
        names.ENV_POD_UID: "metadata.uid",
        names.ENV_POD_IP: "status.podIP",
    }
    return [
        {"name": names.ENV_DEPLOYMENT, "value": owner.name},
        {"name": names.ENV_KERNELS_CACHE, "value": names.KERNELS_DIR},
        *(
            {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
            for name, path in from_pod.items()
        ),
    ]


def _resources(spec: MoEDeploymentSpec) -> Manifest:
    resources = spec.worker.resources.to_wire()
    accelerator = spec.worker.accelerator
    if accelerator is not None:
        count = {accelerator.resource: accelerator.count}
        resources["limits"] = {**resources.get("limits", {}), **count}
        if "requests" in resources:
            resources["requests"] = {**resources["requests"], **count}
    return resources


def _probes(spec: MoEDeploymentSpec) -> Manifest:
    """Liveness = the loop moves or idles on purpose; readiness = this rank admits requests."""

    def get(path: str, **rest: int) -> Manifest:
        http = {"path": path, "port": "http", "scheme": "HTTP"}
        return {"httpGet": http, "periodSeconds": PROBE_SECONDS, "timeoutSeconds": 2, **rest}

    attempts = -(-spec.failure_policy.warmup_grace_seconds // PROBE_SECONDS)
    return {
        "startupProbe": get("/healthz", failureThreshold=attempts),
        "readinessProbe": get("/readyz", failureThreshold=2),
        "livenessProbe": get("/healthz", failureThreshold=15),
    }


def _volumes(
    owner: Owner, spec: MoEDeploymentSpec, token_secret: tuple[str, str]
) -> list[Manifest]:
    name, key = token_secret
    volumes: list[Manifest] = [
        {"name": "moe-config", "configMap": {"name": names.config_name(owner.name)}},
        {
            "name": "moe-control",
            "secret": {
                "secretName": name,
                "items": [{"key": key, "path": names.CONTROL_TOKEN_FILE}],
            },
        },
        {"name": "moe-shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_LIMIT}},
        {"name": "moe-tmp", "emptyDir": {}},
        {"name": "moe-kernels", "emptyDir": {"sizeLimit": KERNELS_LIMIT}},
    ]
    api_key = spec.api.key_secret_ref
    if api_key is not None:
        items = [{"key": api_key.key, "path": names.API_KEY_FILE}]
        secret = {"secretName": api_key.name, "items": items}
        volumes.append({"name": "moe-api-key", "secret": secret})
    claim = model_source(spec.model.uri).claim
    if claim is not None:
        source = {"claimName": claim, "readOnly": True}
        volumes.append({"name": "moe-model", "persistentVolumeClaim": source})
    return volumes


def _mounts(spec: MoEDeploymentSpec) -> list[Manifest]:
    mounts: list[Manifest] = [
        {"name": "moe-config", "mountPath": names.CONFIG_DIR, "readOnly": True},
        {"name": "moe-control", "mountPath": names.CONTROL_TOKEN_DIR, "readOnly": True},
        {"name": "moe-shm", "mountPath": "/dev/shm"},
        {"name": "moe-tmp", "mountPath": "/tmp"},
        {"name": "moe-kernels", "mountPath": names.KERNELS_DIR},
    ]
    if spec.api.key_secret_ref is not None:
        mount = {"name": "moe-api-key", "mountPath": names.API_KEY_DIR, "readOnly": True}
        mounts.append(mount)
    if model_source(spec.model.uri).claim is not None:
        mounts.append({"name": "moe-model", "mountPath": MODEL_MOUNT_DIR, "readOnly": True})
    return mounts
