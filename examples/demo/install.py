"""Brings the product onto a cluster the way a user does: helm, then kubectl apply."""

from __future__ import annotations

import tempfile
from pathlib import Path

from devcluster import chart as devchart
from devcluster import lifecycle, progress, spec
from devcluster.errors import ClusterError
from examples.demo.kube import DemoError, Kube
from examples.demo.stage import DEPLOYMENT, Stage

ROOT = Path(__file__).resolve().parents[2]
CLUSTER_NAME = "demo"
NAMESPACE, OPERATOR_NAMESPACE, RELEASE = "moe-demo", "moe-system", "moe-operator"
GONE_SECONDS = 120


def own_cluster() -> Kube:
    """The 3-node Kubernetes of this machine, started when it does not run."""
    try:
        cluster = lifecycle.up(CLUSTER_NAME, spec.with_nodes(3), progress.printer())
    except ClusterError as error:
        raise DemoError(str(error)) from error
    programs = cluster.binaries.bin
    return Kube(str(programs / "kubectl"), str(programs / "helm"), cluster.kubeconfig, NAMESPACE)


def current_cluster() -> Kube:
    """The cluster that the user's kubeconfig points at."""
    return Kube("kubectl", "helm", None, NAMESPACE)


def chart(stage: Stage, cluster: str) -> None:
    arguments = [
        "upgrade", "--install", RELEASE, str(devchart.CHART),
        "--namespace", OPERATOR_NAMESPACE, "--create-namespace", "--wait", "--timeout", "120s",
    ]  # fmt: skip
    if cluster == "current":
        arguments += ["--set", "image.tag=dev,worker.image.tag=dev"]
        stage.kube.helm(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        values = devchart.write(Path(folder) / "values.json")
        stage.kube.helm(*arguments, "--values", str(values))


def deployment(stage: Stage) -> None:
    """Apply the example anew: what an earlier demo balanced is removed first."""
    kube = stage.kube
    kube.apply(f'{{"apiVersion":"v1","kind":"Namespace","metadata":{{"name":"{NAMESPACE}"}}}}')
    if kube.get("moed", DEPLOYMENT) is not None:
        kube.kubectl("delete", "moed", DEPLOYMENT, "--wait=false")
        kube.wait(
            "the earlier demo's pods to go",
            lambda: kube.get("moed", DEPLOYMENT) is None and not stage.pods(), GONE_SECONDS,
        )  # fmt: skip
    kube.kubectl("apply", "-f", str(ROOT / "examples" / "tiny-moe.yaml"))
    # First a dry run: the operator shall say what it would do before it may do it.
    kube.kubectl(
        "patch", "moed", DEPLOYMENT, "--type", "merge",
        "-p", '{"spec":{"rebalancing":{"mode":"Recommend"}}}',
    )  # fmt: skip


def look_around(cluster: str) -> str:
    """How a person goes on from here."""
    environment = (
        f'  eval "$(python3 -m devcluster env --name {CLUSTER_NAME})"   # kubectl and helm\n'
        if cluster == "own"
        else ""
    )
    uninstall = f"helm uninstall {RELEASE} -n {OPERATOR_NAMESPACE}"
    stop = {
        "own": "make demo-down",
        "current": f"kubectl delete namespace {NAMESPACE}; {uninstall}",
    }[cluster]
    return (
        f"The cluster stays up. Look around:\n{environment}"
        f"  kubectl -n {NAMESPACE} get moed,xp,pods -o wide\n"
        f"  kubectl -n {NAMESPACE} describe moed {DEPLOYMENT}\n"
        f"  kubectl -n {NAMESPACE} port-forward service/{DEPLOYMENT} 8000 &\n"
        "  curl -s localhost:8000/v1/chat/completions -H 'content-type: application/json' \\\n"
        f'    -d \'{{"model":"{DEPLOYMENT}","max_tokens":40,'
        '"messages":[{"role":"user","content":"Hello"}]}\'\n'
        "  curl -s localhost:8000/metrics | grep ^moe_\n"
        f"Stop it: {stop}"
    )
