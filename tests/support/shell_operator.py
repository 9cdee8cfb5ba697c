"""The operator's real shell around the smallest possible reconcile, as a process for tests.

`python -m tests.support.shell_operator '{settings}'`: each MoEDeployment gets one ConfigMap
`<name>-echo` that says what the pass saw, and the status field `ready`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from moe_api import logs, names
from moe_operator import main
from moe_operator.context import Context, Key
from moe_operator.errors import SetupError
from moe_operator.settings import LeaseSettings, Settings, WatchSettings
from moe_operator.workqueue import Backoff, Result

NAMES = {"lease": LeaseSettings, "watches": WatchSettings, "backoff": Backoff}


def echo(context: Context, key: Key) -> Result:
    deployment = context.cluster.get_deployment(key.namespace, key.name)
    if deployment is None:
        context.memory.forget(key)
        return Result()
    pods = context.cluster.list_pods(key.namespace, key.name)
    context.cluster.apply(_echo_of(deployment, [p["metadata"]["name"] for p in pods], context))
    replicas = deployment["spec"]["replicas"]
    status = {"ready": f"{replicas}/{replicas}", "replicas": replicas}
    now = deployment.get("status") or {}
    if any(now.get(name) != value for name, value in status.items()):
        metadata = deployment["metadata"]
        context.cluster.apply_status(
            names.DEPLOYMENT_KIND, key.namespace, key.name, status,
            metadata["resourceVersion"],
        )  # fmt: skip
        context.events.record(deployment, "Normal", "ScaleDecision", f"{replicas} groups")
    return Result()


def _echo_of(deployment: dict[str, Any], pods: list[str], context: Context) -> dict[str, Any]:
    metadata = deployment["metadata"]
    owner = {
        "apiVersion": deployment["apiVersion"], "kind": deployment["kind"],
        "name": metadata["name"], "uid": metadata["uid"],
        "controller": True, "blockOwnerDeletion": True,
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "namespace": metadata["namespace"],
            "name": f"{metadata['name']}-echo",
            "labels": {names.LABEL_DEPLOYMENT: metadata["name"]},
            "ownerReferences": [owner],
        },
        "data": {
            "replicas": str(deployment["spec"]["replicas"]),
            "pods": ",".join(sorted(pods)),
            "leaderEpoch": str(context.leader_epoch),
        },
    }


def settings_from(told: dict[str, Any]) -> Settings:
    parts = {name: NAMES[name](**told.pop(name)) for name in NAMES.keys() & told.keys()}
    told["namespaces"] = tuple(told.get("namespaces", ()))
    return Settings(**told, **parts)


if __name__ == "__main__":
    logs.configure("info")
    try:
        sys.exit(main.run(settings_from(json.loads(sys.argv[1])), echo))
    except SetupError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
