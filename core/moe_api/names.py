"""Every name that two parts of the product must agree on: API group, labels, ports, paths, derived
names.

The operator writes them onto objects, workers and tests read them; nobody spells one a second time.
"""

from __future__ import annotations

import hashlib

API_GROUP = "moe-operator.dev"
API_VERSION = "v1alpha1"
API_GROUP_VERSION = f"{API_GROUP}/{API_VERSION}"
DEPLOYMENT_KIND, DEPLOYMENT_PLURAL = "MoEDeployment", "moedeployments"
PLACEMENT_KIND, PLACEMENT_PLURAL = "ExpertPlacement", "expertplacements"
FIELD_MANAGER = "moe-operator"
SCHEMA = 1
"""Schema version carried by every exchanged document; a reader refuses a newer one by name."""

# Labels on everything the operator makes.
LABEL_NAME = "app.kubernetes.io/name"
LABEL_INSTANCE = "app.kubernetes.io/instance"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_PART_OF = "app.kubernetes.io/part-of"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
LABEL_DEPLOYMENT = f"{API_GROUP}/deployment"
LABEL_GROUP = f"{API_GROUP}/group"
LABEL_MEMBER = f"{API_GROUP}/member"
LABEL_TEMPLATE_HASH = f"{API_GROUP}/template-hash"
LABEL_SCALE_UNIT = f"{API_GROUP}/scale-unit"

# Ports of a worker; a plan carries addresses only.
HTTP_PORT = 8000
CONTROL_PORT = 8001
EXCHANGE_PORT = 8002
"""Members connect here while a generation forms; gloo and NCCL choose ports themselves."""
STORE_PORT = 8003

# Container and mounts of a worker pod.
WORKER_CONTAINER = "worker"
CONFIG_DIR = "/etc/moe/config"
CONFIG_FILE = "worker.json"
CONTROL_TOKEN_DIR = "/etc/moe/control"
CONTROL_TOKEN_FILE = "token"
API_KEY_DIR = "/etc/moe/api"
API_KEY_FILE = "key"
KERNELS_DIR = "/var/cache/moe-kernels"
"""Where a pod keeps compiled kernels; a mount of the user's at this path takes the place of it."""

# Identity handed to a worker process by the operator (downward API where Kubernetes knows it).
ENV_NAMESPACE = "MOE_NAMESPACE"
ENV_DEPLOYMENT = "MOE_DEPLOYMENT"
ENV_GROUP = "MOE_GROUP"
ENV_MEMBER = "MOE_MEMBER"
ENV_POD_NAME = "MOE_POD_NAME"
ENV_POD_UID = "MOE_POD_UID"
ENV_POD_IP = "MOE_POD_IP"
ENV_KERNELS_CACHE = "MOE_KERNELS_CACHE"
"""Folder of compiled kernels; without kernels for this build it is filled from the image's."""

# Control routes of a worker (own listener, bearer token).
CONTROL_PLAN = "/control/v1/plan"
CONTROL_STATE = "/control/v1/state"
CONTROL_LOAD = "/control/v1/load"
CONTROL_DRAIN = "/control/v1/drain"
CONTROL_EXPERT = "/control/v1/experts"
"""`GET {CONTROL_EXPERT}/{layer}/{slot}?expert=E&generation=G&epoch=N`: bytes of a live slot, for
peers."""

MAX_DEPLOYMENT_NAME = 40
MAX_NAME = 63


def derived(*parts: str) -> str:
    """Join parts with '-' to a DNS-1035 label of at most 63 characters, cut with a hash when
    longer."""
    name = "-".join(parts)
    if len(name) <= MAX_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{name[: MAX_NAME - 11].rstrip('-')}-{digest}"


def service_name(deployment: str) -> str:
    return derived(deployment)


def config_name(deployment: str) -> str:
    return derived(deployment, "config")


def control_secret_name(deployment: str, uid: str) -> str:
    """Another name for each incarnation of the object: a node that still runs pods of a deleted
    namesake goes on handing out the immutable secret that it remembers under their name."""
    return derived(deployment, "control", hashlib.sha256(uid.encode()).hexdigest()[:8])


def group_name(deployment: str, group: int) -> str:
    """Name of a group's ExpertPlacement and PodDisruptionBudget."""
    return derived(deployment, f"g{group}")


def pod_name(deployment: str, group: int, member: int, suffix: str) -> str:
    """Name of one incarnation of a member; `suffix` makes it unique among incarnations."""
    return derived(deployment, f"g{group}", f"m{member}", suffix)
