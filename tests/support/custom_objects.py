"""Our kinds in a real API server: create, try, and write the status as the operator does."""

from __future__ import annotations

from typing import Any

from devcluster.cluster import Cluster
from moe_api import names

PLURALS = {
    names.DEPLOYMENT_KIND: names.DEPLOYMENT_PLURAL,
    names.PLACEMENT_KIND: names.PLACEMENT_PLURAL,
}
APPLY = "application/apply-patch+yaml"
Manifest = dict[str, Any]


def collection(namespace: str, kind: str) -> str:
    """Path of the objects of a kind in a namespace."""
    return f"/apis/{names.API_GROUP_VERSION}/namespaces/{namespace}/{PLURALS[kind]}"


def create(cluster: Cluster, namespace: str, manifest: Manifest) -> Manifest:
    """What the API server stored; raises devcluster.api.ApiError when it refuses."""
    path = f"{collection(namespace, manifest['kind'])}?fieldValidation=Strict"
    stored: Manifest = cluster.api.request("POST", path, manifest)
    return stored


def admit(cluster: Cluster, manifest: Manifest) -> Manifest:
    """What the API server would store; raises devcluster.api.ApiError when it refuses."""
    path = f"{collection('default', manifest['kind'])}?fieldValidation=Strict&dryRun=All"
    admitted: Manifest = cluster.api.request("POST", path, manifest)
    return admitted


def apply(cluster: Cluster, manifest: Manifest, subresource: str = "") -> Manifest:
    """Server-side apply under the operator's field manager; gives what is stored then."""
    metadata = manifest["metadata"]
    path = f"{collection(metadata['namespace'], manifest['kind'])}/{metadata['name']}{subresource}"
    query = f"?fieldManager={names.FIELD_MANAGER}&force=true&fieldValidation=Strict"
    stored: Manifest = cluster.api.request("PATCH", path + query, manifest, content_type=APPLY)
    return stored


def apply_status(cluster: Cluster, stored: Manifest, status: Manifest) -> Manifest:
    """Write the whole status of a stored object, and give what is read back."""
    metadata = {key: stored["metadata"][key] for key in ("name", "namespace")}
    body = {key: stored[key] for key in ("apiVersion", "kind")}
    apply(cluster, body | {"metadata": metadata, "status": status}, "/status")
    path = f"{collection(metadata['namespace'], stored['kind'])}/{metadata['name']}"
    read: Manifest = cluster.api.get(path)
    return read
