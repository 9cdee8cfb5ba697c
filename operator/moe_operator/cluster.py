"""The door to the Kubernetes API: plain dicts in wire form, errors by kind, writes fenced.

The only file that knows the `kubernetes` client, and of that only its credentials and its HTTP
connection (`connect`). `ApiServer` is one request over it; `Cluster` is what `observe`,
`reconcile` and `events` ask and say. Every write first asks `may_write` (the lease): a process that
lost it changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import kubernetes
import urllib3

from moe_api import names
from moe_operator.api_server import JSON, Answer, ApiServer, Manifest, Transport
from moe_operator.errors import (
    Conflict,
    Missing,
    NotLeader,
    Refused,
    SetupError,
    Unavailable,
)
from moe_operator.nodes import project
from moe_operator.resources import RESOURCES

__all__ = [
    "ApiServer",
    "Cluster",
    "Endpoint",
    "Manifest",
    "connect",
    "endpoint",
    "load_credentials",
]

APPLY = "application/apply-patch+yaml"


class Endpoint(NamedTuple):
    """Where the API server is and how to prove who we are, for another HTTP client (`main`)."""

    server: str
    verify: bool
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    authorization: str | None
    """Value of the Authorization header; a service account's token is read anew."""


def endpoint(configuration: Any) -> Endpoint:
    return Endpoint(
        server=configuration.host,
        verify=configuration.verify_ssl,
        ca_path=configuration.ssl_ca_cert,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        authorization=configuration.get_api_key_with_prefix("BearerToken"),
    )


def load_credentials(kubeconfig: str | None = None) -> Any:
    """Client configuration of `kubeconfig`, else of the pod's service account, else of KUBECONFIG.

    Raises:
        SetupError: none is there, or the file is no kubeconfig.
    """
    configuration = kubernetes.client.Configuration()
    try:
        if kubeconfig is None and _in_cluster(configuration):
            return configuration
        kubernetes.config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=configuration
        )
    except kubernetes.config.ConfigException as error:
        raise SetupError(
            f"no credentials for a Kubernetes API server: {error} Run in a pod with a service "
            "account, or give --kubeconfig FILE, or set KUBECONFIG"
        ) from error
    return configuration


def _in_cluster(configuration: Any) -> bool:
    try:
        kubernetes.config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
    except kubernetes.config.ConfigException:
        return False
    return True


def connect(configuration: Any) -> Transport:
    """The client's authenticated connection pool as a plain function; thread-safe."""
    configuration.connection_pool_maxsize = 32
    configuration.proxy = None  # asked directly, whatever the environment says
    # Only connecting is tried again: a request that was sent may have been carried out.
    configuration.retries = urllib3.Retry(total=2, connect=2, read=0, status=0, other=0, redirect=0)
    client = kubernetes.client.ApiClient(configuration)

    def send(
        method: str, path: str, query: Mapping[str, str], body: Manifest | None,
        content_type: str, timeout_seconds: tuple[float, float],
    ) -> Answer:  # fmt: skip
        headers = {"Accept": JSON, "Content-Type": content_type, "User-Agent": names.FIELD_MANAGER}
        try:
            serialized = client.param_serialize(
                method, path, query_params=list(query.items()), header_params=headers,
                body=body, auth_settings=["BearerToken"],
            )  # fmt: skip
            answer = client.call_api(*serialized, _request_timeout=timeout_seconds)
            content = answer.read()  # type: ignore[no-untyped-call]
        except (urllib3.exceptions.HTTPError, kubernetes.client.ApiException, OSError) as error:
            raise Unavailable(f"{method} {path}: no answer: {error}") from error
        return Answer(answer.status, answer.headers, content or b"")

    return send


class Cluster:
    """What the operator reads and writes; synchronous, thread-safe, rate-limited.

    `namespaces` empty = the whole cluster.
    """

    def __init__(
        self,
        api: ApiServer,
        may_write: Callable[[], bool],
        namespaces: tuple[str, ...] = (),
    ) -> None:
        self._api, self._may_write, self._namespaces = api, may_write, namespaces

    # Reading.

    def get_deployment(self, namespace: str, name: str) -> Manifest | None:
        return self.get(names.DEPLOYMENT_KIND, namespace, name)

    def list_deployments(self) -> list[tuple[str, str]]:
        """(namespace, name) of every MoEDeployment in reach."""
        return [
            (item["metadata"]["namespace"], item["metadata"]["name"])
            for item in self._everywhere(names.DEPLOYMENT_KIND)
        ]

    def list_pods(self, namespace: str, deployment: str) -> list[Manifest]:
        return self._labelled("Pod", namespace, deployment)

    def list_placements(self, namespace: str, deployment: str) -> list[Manifest]:
        return self._labelled(names.PLACEMENT_KIND, namespace, deployment)

    def list_owned(self, kind: str, namespace: str, deployment: str) -> list[Manifest]:
        """Live list of the kind with our deployment label, e.g. PodDisruptionBudgets."""
        return self._labelled(kind, namespace, deployment)

    def stored_leader_epoch(self) -> int:
        """Largest leaderEpoch in any ExpertPlacement in reach, 0 when there is none."""
        return max(
            (int(item["spec"].get("leaderEpoch", 0)) for item in
             self._everywhere(names.PLACEMENT_KIND)),
            default=0,
        )  # fmt: skip

    def get(self, kind: str, namespace: str | None, name: str) -> Manifest | None:
        """One object of a kind in `resources.RESOURCES`, None when there is none."""
        return self._api.get(RESOURCES[kind].path(namespace, name))

    def list_nodes(self) -> list[Manifest]:
        """What matters of each node: `{name, labels, ready, unschedulable}`."""
        return [project(node) for node in self._api.list(RESOURCES["Node"], None, "")]

    def pod_log_tail(self, namespace: str, pod: str, lines: int) -> str | None:
        """Last lines of the worker's log (at most 64 KiB), None when there is no log (any more)."""
        query = {
            "tailLines": str(lines),
            "limitBytes": "65536",
            "container": names.WORKER_CONTAINER,
        }
        path = RESOURCES["Pod"].path(namespace, pod, "log")
        try:
            return self._api.request("GET", path, query=query).decode(errors="replace") or None
        except (Missing, Refused):  # gone, or its container never started
            return None

    # Writing: each may raise NotLeader, Conflict, Unavailable, Missing or Refused.

    def apply(self, manifest: Manifest) -> Manifest:
        """Server-side apply under our field manager, forced: our fields are ours."""
        return self._apply(manifest, subresource=None)

    def apply_status(
        self, kind: str, namespace: str, name: str, status: Manifest,
        resource_version: str | None = None,
    ) -> Manifest | None:  # fmt: skip
        """Server-side apply on /status; None when the object is gone (that is no fault).

        `resource_version` also tells an object from a later one of the same name; a UID would not:
        the API server ignores all other metadata here.

        Raises:
            Conflict: the object is not at `resource_version`.
        """
        metadata = {"namespace": namespace, "name": name}
        if resource_version is not None:
            metadata["resourceVersion"] = resource_version
        body = {
            "apiVersion": RESOURCES[kind].api_version, "kind": kind,
            "metadata": metadata, "status": status,
        }  # fmt: skip
        try:
            return self._apply(body, subresource="status")
        except Missing:
            return None

    def create(self, manifest: Manifest) -> Manifest:
        """Create, never change. Raises AlreadyExists when the name is taken."""
        path = RESOURCES[manifest["kind"]].path(manifest["metadata"].get("namespace"))
        return self._write("POST", path, manifest, JSON)

    def create_pod(self, manifest: Manifest) -> Manifest:
        return self.create(manifest)

    def delete(
        self, kind: str, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> bool:
        """Delete exactly this incarnation; False when it was gone (or another) already."""
        body: Manifest = {
            "apiVersion": "v1", "kind": "DeleteOptions",
            "preconditions": {"uid": uid}, "propagationPolicy": "Background",
        }  # fmt: skip
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            self._write("DELETE", RESOURCES[kind].path(namespace, name), body, JSON)
        except (Missing, Conflict):  # Conflict: the name now belongs to another UID
            return False
        return True

    def delete_pod(
        self, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> bool:
        return self.delete("Pod", namespace, name, uid, grace_seconds)

    def _apply(self, manifest: Manifest, subresource: str | None) -> Manifest:
        metadata = manifest["metadata"]
        path = RESOURCES[manifest["kind"]].path(
            metadata.get("namespace"), metadata["name"], subresource
        )
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return self._write("PATCH", path, manifest, APPLY, query)

    def _write(
        self, method: str, path: str, body: Manifest, content_type: str,
        query: Mapping[str, str] | None = None,
    ) -> Manifest:  # fmt: skip
        if not self._may_write():
            raise NotLeader(f"{method} {path}: this process does not hold the lease")
        answer = self._api.request(
            method, path, query=query or {"fieldManager": names.FIELD_MANAGER}, body=body,
            content_type=content_type,
        )  # fmt: skip
        written: Manifest = json.loads(answer)
        return written

    def _labelled(self, kind: str, namespace: str, deployment: str) -> list[Manifest]:
        selector = f"{names.LABEL_DEPLOYMENT}={deployment}"
        return list(self._api.list(RESOURCES[kind], namespace, selector))

    def _everywhere(self, kind: str) -> Iterator[Manifest]:
        for namespace in self._namespaces or (None,):
            yield from self._api.list(RESOURCES[kind], namespace, "")
