"""The chart in a real API server: definitions that outlive it, rights that suffice and no more."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from devcluster.api import ApiError
from devcluster.cluster import Cluster
from devcluster.waiting import wait_until
from moe_api import names
from tests.support.chart import CHART
from tests.support.custom_objects import collection, create
from tests.support.manifests import moe_deployment
from tests.support.operator_process import OperatorProcess, free_port

pytestmark = pytest.mark.apiserver
RELEASE = "moe-operator"
Manifest = dict[str, Any]


def install(cluster: Cluster, namespace: str, file: Path, values: Manifest) -> None:
    """`helm upgrade --install`; the definitions may be there already, as after an uninstall."""
    file.write_text(json.dumps(values))
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", namespace,
        "--values", str(file), "--take-ownership", "--server-side=true", "--force-conflicts",
    )  # fmt: skip


def operator_deployment(cluster: Cluster, namespace: str) -> Manifest:
    found: Manifest = cluster.api.get(f"/apis/apps/v1/namespaces/{namespace}/deployments/{RELEASE}")
    return found


def allowed(cluster: Cluster, namespace: str) -> Callable[..., bool]:
    """Whether the operator's service account may do something."""

    def ask(verb: str, group: str, resource: str, where: str = namespace, name: str = "") -> bool:
        resource, _, subresource = resource.partition("/")
        attributes = {
            "verb": verb, "group": group, "resource": resource, "subresource": subresource,
            "namespace": where, "name": name,
        }  # fmt: skip
        review = cluster.api.request(
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {
                    "user": f"system:serviceaccount:{namespace}:{RELEASE}",
                    "resourceAttributes": attributes,
                },
            },
        )
        return bool(review["status"]["allowed"])

    return ask


def test_definitions_and_objects_outlive_the_chart(
    definitions: Cluster, namespace: str, tmp_path: Path
) -> None:
    install(definitions, namespace, tmp_path / "values", {"replicas": 0})
    create(definitions, namespace, moe_deployment())
    definitions.helm("uninstall", RELEASE, "--namespace", namespace)
    stored = definitions.api.get(f"{collection(namespace, names.DEPLOYMENT_KIND)}/tiny")
    assert stored["spec"]["model"]
    with pytest.raises(ApiError, match="404"):
        operator_deployment(definitions, namespace)


def test_pod_passes_the_restricted_standard(
    definitions: Cluster, namespace: str, tmp_path: Path
) -> None:
    label = {"pod-security.kubernetes.io/enforce": "restricted"}
    definitions.api.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
    install(definitions, namespace, tmp_path / "values", {"replicas": 0})
    template = operator_deployment(definitions, namespace)["spec"]["template"]
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "trial", "labels": template["metadata"]["labels"]},
        "spec": template["spec"],
    }  # fmt: skip
    path = f"/api/v1/namespaces/{namespace}/pods?dryRun=All"
    assert definitions.api.request("POST", path, pod)["metadata"]["name"] == "trial"
    pod["spec"] = template["spec"] | {"hostNetwork": True}
    with pytest.raises(ApiError, match="violates PodSecurity"):
        definitions.api.request("POST", path, pod)


def test_rights_are_the_ones_in_use_and_no_more(
    definitions: Cluster, namespace: str, tmp_path: Path
) -> None:
    install(definitions, namespace, tmp_path / "values", {"replicas": 0})
    may = allowed(definitions, namespace)
    group = names.API_GROUP
    for verb, api_group, resource in (
        ("watch", group, "moedeployments"),
        ("patch", group, "moedeployments/status"),
        ("create", group, "expertplacements"),
        ("patch", group, "expertplacements"),
        ("delete", group, "expertplacements"),
        ("patch", group, "expertplacements/status"),
        ("delete", "", "pods"),
        ("get", "", "pods/log"),
        ("create", "", "secrets"),
        ("patch", "policy", "poddisruptionbudgets"),
        ("create", "events.k8s.io", "events"),
        ("watch", "", "nodes"),
        ("create", "coordination.k8s.io", "leases"),
    ):
        assert may(verb, api_group, resource), f"{verb} {resource}"
    for verb, api_group, resource in (
        ("list", "", "secrets"),
        ("update", "", "secrets"),
        ("delete", "", "secrets"),
        ("patch", "", "nodes"),
        ("patch", group, "moedeployments"),
        ("delete", group, "moedeployments"),
        ("create", "", "pods/exec"),
        ("create", "rbac.authorization.k8s.io", "roles"),
        ("list", "coordination.k8s.io", "leases"),
    ):
        assert not may(verb, api_group, resource), f"{verb} {resource}"
    assert may("update", "coordination.k8s.io", "leases", name=RELEASE)
    assert not may("update", "coordination.k8s.io", "leases", name="kube-scheduler")


@pytest.mark.parametrize("only_own_namespace", [False, True], ids=["cluster", "namespaces"])
def test_rights_suffice_for_the_real_operator(
    definitions: Cluster, namespace: str, tmp_path: Path, only_own_namespace: bool
) -> None:
    """Run with the chart's arguments and the service account's token, it makes the children."""
    values = {
        "replicas": 0,
        "watchNamespaces": [namespace] if only_own_namespace else [],
        "worker": {"image": {"repository": "example.org/worker", "tag": "1"}},
    }
    install(definitions, namespace, tmp_path / "values", values)
    port = free_port()
    with OperatorProcess(
        service_account_kubeconfig(definitions, namespace, tmp_path / "kubeconfig"),
        tmp_path / "operator.log",
        "tests.support.run_operator",
        *arguments_of(definitions, namespace, tmp_path / "worker-defaults.yaml"),
        f"--probe-port={port}",
        probe_port=port,
    ) as operator:
        operator.wait_until_ready()
        manifest = moe_deployment(spec={"parallelism": {"expert": 2}})
        uid = create(definitions, namespace, manifest)["metadata"]["uid"]
        wait_until(lambda: len(pods(definitions, namespace)) == 2, 60, "two worker pods")
        for path in (
            f"/api/v1/namespaces/{namespace}/secrets/{names.control_secret_name('tiny', uid)}",
            f"/api/v1/namespaces/{namespace}/configmaps/{names.config_name('tiny')}",
            f"/api/v1/namespaces/{namespace}/services/{names.service_name('tiny')}",
        ):
            assert definitions.api.get(path)
        wait_until(lambda: accepted(definitions, namespace), 60, "condition Accepted")
        # A namespace of another test may be on its way out, which forbids as well: not for rights.
        assert "forbidden: user" not in operator.log.read_text().lower()
        assert pods(definitions, namespace)[0]["spec"]["containers"][0]["image"] == (
            "example.org/worker:1"
        )


def arguments_of(cluster: Cluster, namespace: str, defaults: Path) -> list[str]:
    """The installed command line, with the mounted file written where this process can read it."""
    (container,) = operator_deployment(cluster, namespace)["spec"]["template"]["spec"]["containers"]
    config = cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps/{RELEASE}-worker-defaults")
    defaults.write_text(config["data"]["worker-defaults.yaml"])
    mounted = "--worker-defaults=/etc/moe-operator/worker-defaults.yaml"
    assert mounted in container["args"]
    return [f"--worker-defaults={defaults}" if a == mounted else a for a in container["args"]]


def service_account_kubeconfig(cluster: Cluster, namespace: str, file: Path) -> Path:
    """What the operator's pod would have: its service account's token and nothing else."""
    account = f"/api/v1/namespaces/{namespace}/serviceaccounts/{RELEASE}"
    token = cluster.api.request("POST", f"{account}/token", {"spec": {}})["status"]["token"]
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "only",
        "clusters": [{"name": "only", "cluster": {
            "server": cluster.url, "certificate-authority": str(cluster.authority)}}],
        "users": [{"name": "only", "user": {"token": token}}],
        "contexts": [{"name": "only", "context": {"cluster": "only", "user": "only"}}],
    }  # fmt: skip
    file.write_text(yaml.safe_dump(config))
    return file


def pods(cluster: Cluster, namespace: str) -> list[Manifest]:
    found: list[Manifest] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return found


def accepted(cluster: Cluster, namespace: str) -> bool:
    stored = cluster.api.get(f"{collection(namespace, names.DEPLOYMENT_KIND)}/tiny")
    conditions = stored.get("status", {}).get("conditions", [])
    return any(c["type"] == "Accepted" and c["status"] == "True" for c in conditions)
