"""Where each kind lives in the API: the paths that `cluster` asks and the ones `main` watches."""

from __future__ import annotations

from typing import NamedTuple

from moe_api import names


class Resource(NamedTuple):
    group: str
    version: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(
        self, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Path of one object, or of the list in a namespace (None: of all namespaces)."""
        root = f"/apis/{self.group}" if self.group else "/api"
        parts = [root, self.version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


RESOURCES: dict[str, Resource] = {
    names.DEPLOYMENT_KIND: Resource(names.API_GROUP, names.API_VERSION, names.DEPLOYMENT_PLURAL),
    names.PLACEMENT_KIND: Resource(names.API_GROUP, names.API_VERSION, names.PLACEMENT_PLURAL),
    "Pod": Resource("", "v1", "pods"),
    "Service": Resource("", "v1", "services"),
    "ConfigMap": Resource("", "v1", "configmaps"),
    "Secret": Resource("", "v1", "secrets"),
    "Node": Resource("", "v1", "nodes", namespaced=False),
    "PersistentVolumeClaim": Resource("", "v1", "persistentvolumeclaims"),
    "PodDisruptionBudget": Resource("policy", "v1", "poddisruptionbudgets"),
    "NetworkPolicy": Resource("networking.k8s.io", "v1", "networkpolicies"),
    "Lease": Resource("coordination.k8s.io", "v1", "leases"),
    "Event": Resource("events.k8s.io", "v1", "events"),
    "CustomResourceDefinition": Resource(
        "apiextensions.k8s.io", "v1", "customresourcedefinitions", namespaced=False
    ),
}
"""Every kind this operator touches, by the name it has in manifests."""
