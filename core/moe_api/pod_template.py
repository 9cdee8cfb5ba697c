"""Which keys of `worker.podTemplate` the operator keeps for itself, by name.

The CRD keeps the overlay's fields unread, so the check is here, and its outcome is `Accepted=False,
InvalidSpec`. Neighbours: `deployment.parse` asks; the operator merges what passed.

Free for users: labels and annotations of their own; scheduling (nodeSelector, affinity,
tolerations, topologySpreadConstraints, priorityClassName, schedulerName, runtimeClassName);
serviceAccountName, imagePullSecrets, securityContext, hostNetwork, DNS; more volumes, mounts and
containers; and of our container `command` (how its image starts the worker), `image` (over
`spec.worker.image`), variables, `securityContext` and claims of devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_api import names
from moe_api.workload import RESERVED_ENV_PREFIX

RESERVED_VOLUME_PREFIX = "moe-"
"""All volumes the operator makes begin with this; an overlay's may not."""
RESERVED_MOUNT_DIR = "/etc/moe"
"""Config and control token are mounted below it."""

TOP_KEYS = ("metadata", "spec")
METADATA_KEYS = ("labels", "annotations")
OWN_LABELS = (
    names.LABEL_NAME,
    names.LABEL_INSTANCE,
    names.LABEL_COMPONENT,
    names.LABEL_PART_OF,
    names.LABEL_MANAGED_BY,
)
POD_KEYS = {
    "restartPolicy": "the operator replaces pods itself",
    "automountServiceAccountToken": "workers never get a token of the cluster",
    "terminationGracePeriodSeconds": "set spec.disruption.drainSeconds instead",
    "activeDeadlineSeconds": "workers have no end",
    "ephemeralContainers": "use kubectl debug",
}
CONTAINER_KEYS = {
    "args": "the operator tells the worker what to do",
    "ports": "ports of a worker are fixed",
    "readinessProbe": "the worker's own health decides",
    "livenessProbe": "the worker's own health decides",
    "startupProbe": "set spec.failurePolicy.warmupGraceSeconds instead",
    "lifecycle": "the worker drains on SIGTERM",
}
RESOURCE_KEYS = ("limits", "requests")

Finding = tuple[str, str]
"""Path below podTemplate and the way out."""


def reserved_pod_template_keys(overlay: Mapping[str, Any]) -> list[str]:
    """Paths below podTemplate that an overlay may not set; empty when it may be merged."""
    return [path for path, _ in _findings(overlay)]


def pod_template_faults(overlay: Mapping[str, Any]) -> list[str]:
    """The same as lines for users: field and way out."""
    return [
        f"spec.worker.podTemplate.{path} is not yours to set: {way_out}"
        for path, way_out in _findings(overlay)
    ]


def _findings(overlay: Mapping[str, Any]) -> Iterator[Finding]:
    for key in overlay:
        if key not in TOP_KEYS:
            yield key, "only metadata and spec are merged, remove it"
    metadata = overlay.get("metadata") or {}
    spec = overlay.get("spec") or {}
    if isinstance(metadata, Mapping):
        yield from _in_metadata(metadata)
    else:
        yield "metadata", "write a map with labels and annotations"
    if isinstance(spec, Mapping):
        yield from _in_spec(spec)
    else:
        yield "spec", "write a map as in a pod"


def _in_metadata(metadata: Mapping[str, Any]) -> Iterator[Finding]:
    for key, value in metadata.items():
        if key not in METADATA_KEYS:
            yield f"metadata.{key}", "only labels and annotations are merged, remove it"
        elif value is not None and not isinstance(value, Mapping):
            yield f"metadata.{key}", "write a map of strings"
        else:
            for name in value or {}:
                if name in OWN_LABELS or name.startswith(f"{names.API_GROUP}/"):
                    yield f"metadata.{key}[{name}]", "the operator finds its pods by it, remove it"


def _in_spec(spec: Mapping[str, Any]) -> Iterator[Finding]:
    for key, way_out in POD_KEYS.items():
        if key in spec:
            yield f"spec.{key}", f"{way_out}, remove it"
    yield from _in_volumes(spec)
    for key in ("containers", "initContainers"):
        yield from _in_containers(spec, key)


def _in_volumes(spec: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _unnamed(spec, "spec.volumes", "name")
    for volume in _maps(spec.get("volumes")):
        name = str(volume.get("name", ""))
        if name.startswith(RESERVED_VOLUME_PREFIX):
            yield (
                f"spec.volumes[{name}]",
                f"names beginning with {RESERVED_VOLUME_PREFIX} are the operator's, rename it",
            )


def _in_containers(spec: Mapping[str, Any], key: str) -> Iterator[Finding]:
    yield from _unnamed(spec, f"spec.{key}", "name")
    for container in _maps(spec.get(key)):
        name = container.get("name")
        if name == names.WORKER_CONTAINER and key == "containers":
            yield from _in_worker(f"spec.{key}[{name}]", container)
        elif name == names.WORKER_CONTAINER:
            yield f"spec.{key}[{name}]", "this name is the worker's container, rename it"


def _in_worker(path: str, container: Mapping[str, Any]) -> Iterator[Finding]:
    for key, way_out in CONTAINER_KEYS.items():
        if key in container:
            yield f"{path}.{key}", f"{way_out}, remove it"
    resources = container.get("resources")
    for key in RESOURCE_KEYS:
        if isinstance(resources, Mapping) and key in resources:
            yield f"{path}.resources.{key}", "set spec.worker.resources instead, remove it"
    yield from _unnamed(container, f"{path}.env", "name")
    for variable in _maps(container.get("env")):
        name = str(variable.get("name", ""))
        if name.startswith(RESERVED_ENV_PREFIX):
            yield (
                f"{path}.env[{name}]",
                f"names beginning with {RESERVED_ENV_PREFIX} are the operator's, rename it",
            )
    yield from _unnamed(container, f"{path}.volumeMounts", "mountPath")
    for mount in _maps(container.get("volumeMounts")):
        where = str(mount.get("mountPath", ""))
        if f"{where.rstrip('/')}/".startswith(f"{RESERVED_MOUNT_DIR}/"):
            yield (
                f"{path}.volumeMounts[{where}]",
                f"{RESERVED_MOUNT_DIR} is the operator's, mount it elsewhere",
            )


def _unnamed(owner: Mapping[str, Any], path: str, key: str) -> Iterator[Finding]:
    """A list merged by key needs that key in every item; null would remove the operator's items."""
    field = path.rsplit(".", 1)[1]
    if field not in owner:
        return
    items = owner[field]
    if isinstance(items, str) or not isinstance(items, Sequence):
        yield path, "write a list"
        return
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or not item.get(key):
            yield f"{path}[{index}]", f"give it a {key}, by which it is merged"


def _maps(items: Any) -> list[Mapping[str, Any]]:
    if isinstance(items, str) or not isinstance(items, Sequence):
        return []
    return [item for item in items if isinstance(item, Mapping)]
