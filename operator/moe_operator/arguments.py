"""The command line of `moe-operator`: what each option is for, and the `Settings` it makes."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from moe_operator.errors import SetupError
from moe_operator.settings import ClientSettings, LeaseSettings, Settings, WorkerDefaults

SERVICE_ACCOUNT_NAMESPACE = pathlib.Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DESCRIPTION = """\
Turns MoEDeployment objects into groups of expert-parallel worker pods, heals them, and moves
their experts while they serve.
"""
EPILOG = """\
examples:
  moe-operator run                               whole cluster, in a pod or with KUBECONFIG
  moe-operator run --namespace team-a            only this namespace
  moe-operator run --log-level debug --probe-port 0

Run as many copies as you like: one leads by a Lease, the others wait to take over. It writes no
annotation and no finalizer on your objects; stopping it leaves everything serving.
Probes: GET /healthz, /readyz, /metrics on --probe-port.
"""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="moe-operator", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="run")
    run = commands.add_parser(
        "run", help="watch MoEDeployments and reconcile them", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    defaults = Settings()
    run.add_argument(
        "--namespace", action="append", default=[], metavar="NS",
        help="serve only this namespace; repeat for more (default: the whole cluster)",
    )  # fmt: skip
    run.add_argument(
        "--kubeconfig",
        metavar="FILE",
        help="credentials (default: the pod's service account, else KUBECONFIG)",
    )
    run.add_argument(
        "--worker-image", metavar="IMAGE",
        help="image of worker pods whose MoEDeployment names none",
    )  # fmt: skip
    run.add_argument(
        "--worker-defaults", type=pathlib.Path, metavar="FILE",
        help="YAML with image, imagePullPolicy, imagePullSecrets (names) and podTemplate (an "
        "overlay under the user's own) for worker pods",
    )  # fmt: skip
    run.add_argument(
        "--log-level", default="info", choices=("debug", "info", "warning", "error"),
        help="one JSON object a line on stderr (default: info)",
    )  # fmt: skip
    run.add_argument(
        "--probe-port", type=int, default=defaults.probe_port, metavar="PORT",
        help="port of /healthz, /readyz and /metrics; 0 = any free one (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--leader-election-namespace", metavar="NS",
        help="where the Lease lives (default: the pod's namespace, outside a cluster 'default')",
    )  # fmt: skip
    run.add_argument(
        "--leader-election-name", default=defaults.lease.name, metavar="NAME",
        help="name of the Lease; operators with the same one are copies (default: %(default)s)",
    )  # fmt: skip
    for option, value, text in (
        ("--lease-duration", defaults.lease.duration_seconds,
         "seconds without a renewal after which a standby takes over"),
        ("--lease-renew-deadline", defaults.lease.renew_deadline_seconds,
         "seconds without a renewal after which the leader stops writing and exits"),
        ("--lease-retry", defaults.lease.retry_seconds, "seconds between renewals"),
        ("--resync-seconds", defaults.resync_seconds,
         "every object is looked at this often even without an event"),
        ("--kube-qps", defaults.client.requests_per_second,
         "requests a second to the API server, on average"),
    ):  # fmt: skip
        run.add_argument(
            option, type=float, default=value, metavar="N", help=f"{text} (default: %(default)s)"
        )
    run.add_argument(
        "--kube-burst", type=int, default=defaults.client.burst, metavar="N",
        help="requests to the API server at once (default: %(default)s)",
    )  # fmt: skip
    run.add_argument(
        "--reconcile-threads", type=int, default=defaults.reconcile_threads, metavar="N",
        help="objects worked on at the same time (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(arguments)


def settings_from(options: argparse.Namespace) -> Settings:
    """Raises SetupError naming the option and the way out."""
    try:
        lease = LeaseSettings(
            namespace=options.leader_election_namespace or own_namespace(),
            name=options.leader_election_name,
            duration_seconds=options.lease_duration,
            renew_deadline_seconds=options.lease_renew_deadline,
            retry_seconds=options.lease_retry,
        )
    except ValueError as error:
        raise SetupError(f"--lease-…: {error}") from error
    for option in ("kube_qps", "kube_burst", "reconcile_threads", "resync_seconds"):
        if getattr(options, option) <= 0:
            raise SetupError(f"--{option.replace('_', '-')} must be more than 0")
    return Settings(
        kubeconfig=options.kubeconfig,
        namespaces=tuple(dict.fromkeys(options.namespace)),
        worker=worker_defaults(options.worker_defaults, options.worker_image),
        lease=lease,
        client=ClientSettings(requests_per_second=options.kube_qps, burst=options.kube_burst),
        reconcile_threads=options.reconcile_threads,
        resync_seconds=options.resync_seconds,
        probe_port=options.probe_port,
    )


def worker_defaults(file: pathlib.Path | None, image: str | None) -> WorkerDefaults:
    """The file's content, with the image of the command line over it."""
    told = _read_mapping(file) if file is not None else {}
    known = {"image", "imagePullPolicy", "imagePullSecrets", "podTemplate"}
    unknown = sorted(set(told) - known)
    if unknown:
        raise SetupError(
            f"--worker-defaults {file}: unknown {', '.join(unknown)}; known: "
            f"{', '.join(sorted(known))}"
        )
    defaults = WorkerDefaults()
    return WorkerDefaults(
        image=image or told.get("image"),
        image_pull_policy=told.get("imagePullPolicy", defaults.image_pull_policy),
        image_pull_secrets=tuple(told.get("imagePullSecrets") or ()),
        pod_template=told.get("podTemplate") or {},
    )


def own_namespace() -> str:
    """Namespace of this pod, `default` outside a cluster."""
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text().strip() or "default"
    except FileNotFoundError:
        return "default"


def identity() -> str:
    """Unique for each process, and readable: the pod's name first."""
    return f"{os.uname().nodename}_{os.getpid()}_{os.urandom(4).hex()}"


def _read_mapping(file: pathlib.Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise SetupError(f"--worker-defaults {file}: cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise SetupError(f"--worker-defaults {file}: holds no mapping of names to values")
    return content
