"""What the chart installs: the operator's pod, its rights, the definitions, what is optional."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from moe_api import crd, metrics
from tests.support.chart import CHART, Chart, Manifest, of_kind, pod_template


@pytest.fixture(scope="module")
def defaults(chart: Chart) -> list[Manifest]:
    return chart.render()


def container(objects: list[Manifest]) -> Manifest:
    (only,) = pod_template(objects)["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_definitions_are_the_generators(defaults: list[Manifest]) -> None:
    assert of_kind(defaults, "CustomResourceDefinition") == sorted(
        (crd.deployment_crd(), crd.placement_crd()), key=lambda found: found["metadata"]["name"]
    )


def test_definitions_can_be_left_out(chart: Chart) -> None:
    objects = chart.render({"crds": {"install": False}})
    assert of_kind(objects, "CustomResourceDefinition") == []


def test_template_includes_the_files_raw(chart: Chart) -> None:
    """What reaches the API server is the generator's text, not a rendering of it."""
    for name, content in crd.render().items():
        assert (CHART / "files" / name).read_text() == content
        assert "{{" not in content


def test_pod_is_as_locked_down_as_the_restricted_standard_asks(defaults: list[Manifest]) -> None:
    spec = pod_template(defaults)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    operator = container(defaults)
    assert operator["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"name": "tmp", "mountPath": "/tmp"} in operator["volumeMounts"]
    assert operator["resources"]["limits"]["memory"]


def test_probes_ask_the_port_that_the_operator_serves(chart: Chart) -> None:
    objects = chart.render({"probePort": 9000})
    operator = container(objects)
    assert "--probe-port=9000" in operator["args"]
    (port,) = operator["ports"]
    assert port["containerPort"] == 9000
    assert operator["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": port["name"]}
    assert operator["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": port["name"]}


def test_operator_understands_its_arguments(chart: Chart) -> None:
    from moe_operator import arguments

    operator = container(chart.render({"watchNamespaces": ["team-a", "team-b"]}))
    options = arguments.parse(operator["args"])
    options.worker_defaults = None  # a file of the pod
    settings = arguments.settings_from(options)
    assert settings.namespaces == ("team-a", "team-b")
    assert settings.lease.namespace == "moe-system"
    assert settings.lease.name == "demo-moe-operator"


def test_operator_understands_the_worker_defaults(chart: Chart, tmp_path: Any) -> None:
    from moe_operator import arguments

    overlay = {"spec": {"tolerations": [{"operator": "Exists"}]}}
    worker = {
        "image": {"repository": "example.org/worker", "digest": f"sha256:{'0' * 64}"},
        "imagePullSecrets": [{"name": "pull"}],
        "podTemplate": overlay,
    }
    (config,) = of_kind(chart.render({"worker": worker}), "ConfigMap")
    file = tmp_path / "worker-defaults.yaml"
    file.write_text(config["data"]["worker-defaults.yaml"])
    defaults = arguments.worker_defaults(file, None)
    assert defaults.image == f"example.org/worker@sha256:{'0' * 64}"
    assert defaults.image_pull_secrets == ("pull",)
    assert defaults.pod_template == overlay


def test_changed_worker_defaults_restart_the_operator(chart: Chart) -> None:
    def checksum(values: Manifest) -> str:
        annotations = pod_template(chart.render(values))["metadata"]["annotations"]
        return str(annotations["checksum/worker-defaults"])

    assert checksum({}) != checksum({"worker": {"image": {"tag": "other"}}})
    assert checksum({}) == checksum({"replicas": 2})


def test_images_follow_the_chart_unless_told(chart: Chart) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(chart.render())["image"] == f"moe-operator:{version}"
    image = {"repository": "example.org/operator", "tag": "2"}
    assert container(chart.render({"image": image}))["image"] == "example.org/operator:2"


def test_program_and_mounts_can_be_the_hosts(chart: Chart) -> None:
    values: Manifest = {
        "command": ["/opt/python", "-m", "moe_operator"],
        "extraEnv": [{"name": "PYTHONPATH", "value": "/src"}],
        "extraVolumes": [{"name": "src", "hostPath": {"path": "/src"}}],
        "extraVolumeMounts": [{"name": "src", "mountPath": "/src", "readOnly": True}],
        "extraArgs": ["--log-level=debug"],
    }
    objects = chart.render(values)
    operator = container(objects)
    assert operator["command"] == values["command"]
    assert operator["args"][0] == "run"
    assert operator["args"][-1] == "--log-level=debug"
    assert operator["env"] == values["extraEnv"]
    assert values["extraVolumes"][0] in pod_template(objects)["spec"]["volumes"]
    assert values["extraVolumeMounts"][0] in operator["volumeMounts"]


def rules_of(objects: list[Manifest]) -> list[Manifest]:
    roles = of_kind(objects, "ClusterRole") + of_kind(objects, "Role")
    return [rule for role in roles for rule in role["rules"]]


def test_rights_have_no_wildcard_and_secrets_are_never_listed(defaults: list[Manifest]) -> None:
    for rule in rules_of(defaults):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        if "secrets" in rule["resources"]:
            assert set(rule["verbs"]) == {"get", "create"}


def test_listed_namespaces_get_roles_and_the_cluster_only_nodes(chart: Chart) -> None:
    objects = chart.render({"watchNamespaces": ["team-a", "team-b"], "rbac": {"aggregate": False}})
    (cluster_role,) = of_kind(objects, "ClusterRole")
    assert [rule["resources"] for rule in cluster_role["rules"]] == [["nodes"]]
    places = [role["metadata"]["namespace"] for role in of_kind(objects, "Role")]
    assert sorted(places) == ["moe-system", "team-a", "team-b"]
    bound = [role["metadata"]["namespace"] for role in of_kind(objects, "RoleBinding")]
    assert sorted(bound) == sorted(places)


def test_people_with_the_view_role_cannot_write(defaults: list[Manifest]) -> None:
    label = "rbac.authorization.k8s.io/aggregate-to-view"
    viewers = [role for role in of_kind(defaults, "ClusterRole")
               if role["metadata"]["labels"].get(label) == "true"]  # fmt: skip
    assert len(viewers) == 1
    assert all(set(rule["verbs"]) <= {"get", "list", "watch"} for rule in viewers[0]["rules"])


def test_nobody_but_the_operator_may_write_plans(defaults: list[Manifest]) -> None:
    roles = of_kind(defaults, "ClusterRole")
    aggregated = [role for role in roles if "aggregate-to" in str(role["metadata"]["labels"])]
    assert len(aggregated) == 2
    for role in aggregated:
        for rule in role["rules"]:
            if "expertplacements" in rule["resources"]:
                assert set(rule["verbs"]) == {"get", "list", "watch"}


def test_rights_can_be_left_to_others(chart: Chart) -> None:
    values = {"rbac": {"create": False}, "serviceAccount": {"create": False, "name": "theirs"}}
    objects = chart.render(values)
    assert rules_of(objects) == []
    assert of_kind(objects, "ServiceAccount") == []
    assert pod_template(objects)["spec"]["serviceAccountName"] == "theirs"


def test_replicas_bring_a_budget_that_never_blocks_for_ever(chart: Chart) -> None:
    assert of_kind(chart.render(), "PodDisruptionBudget") == []
    (budget,) = of_kind(chart.render({"replicas": 2}), "PodDisruptionBudget")
    assert budget["spec"]["minAvailable"] == 1


def test_monitoring_is_optional_and_quotes_declared_metrics(chart: Chart) -> None:
    assert of_kind(chart.render(), "ServiceMonitor") == []
    both = {"serviceMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}
    objects = chart.render({"metrics": both})
    (monitor,) = of_kind(objects, "ServiceMonitor")
    (service,) = of_kind(objects, "Service")
    assert monitor["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert (
        monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    )
    (rule,) = of_kind(objects, "PrometheusRule")
    declared = {metric.name for metric in metrics.OPERATOR}
    for alert in rule["spec"]["groups"][0]["rules"]:
        assert any(name in alert["expr"] for name in declared), alert["alert"]


@pytest.mark.parametrize("release", ["r", "moe-operator", "a" * 53])
def test_names_fit(chart: Chart, release: str) -> None:
    values = {"replicas": 2, "watchNamespaces": ["n" * 63]}
    for found in chart.render(values, release, namespace="s" * 63):
        if found["kind"] != "CustomResourceDefinition" and "Role" not in found["kind"]:
            assert len(found["metadata"]["name"]) <= 63
