"""etcd, the API server, the controllers and the scheduler, as plain processes on the host.

All of them are of the binary that `devcluster.build` makes; the API server and etcd listen on
ports of this instance alone, the others on none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devcluster import credentials, processes
from devcluster.api import Api
from devcluster.credentials import Credentials
from devcluster.network import SERVICE_SUBNET
from devcluster.waiting import wait_until

ETCD = "etcd"
API_SERVER = "apiserver"
CONTROLLERS = "controller-manager"
SCHEDULER = "scheduler"
READY_SECONDS = 180


@dataclass(frozen=True)
class ControlPlane:
    """Where the control plane of one instance runs and what it is made of."""

    state: Path
    kube: Path
    host: str
    api_port: int
    etcd_port: int
    peer_port: int
    has_nodes: bool

    @property
    def url(self) -> str:
        return f"https://{self.host}:{self.api_port}"

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.state / "credentials")

    @property
    def process_names(self) -> list[str]:
        scheduler = [SCHEDULER] if self.has_nodes else []
        return [ETCD, API_SERVER, CONTROLLERS, *scheduler]

    def start_store(self) -> None:
        processes.start(self.state, ETCD, self.etcd_command())

    def start_api_server(self, api: Api) -> None:
        """Start the API server on an etcd that runs already, and wait until it is ready."""
        processes.start(self.state, API_SERVER, self.api_server_command())
        wait_until(
            api.is_ready,
            READY_SECONDS,
            "the API server to be ready",
            check=lambda: processes.require(self.state, [ETCD, API_SERVER]),
            explain=lambda: processes.last_lines(processes.log_file(self.state, API_SERVER)),
        )

    def start_controllers(self) -> None:
        processes.start(self.state, CONTROLLERS, self.controllers_command())
        if self.has_nodes:
            processes.start(self.state, SCHEDULER, self.scheduler_command())

    def etcd_command(self) -> list[str]:
        client = f"http://127.0.0.1:{self.etcd_port}"
        peer = f"http://127.0.0.1:{self.peer_port}"
        return [
            *(str(self.kube), "etcd"),
            f"--data-dir={self.state / 'etcd'}",
            "--unsafe-no-fsync",  # nothing here outlives the machine's next start anyway
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
        ]

    def api_server_command(self) -> list[str]:
        files = self.credentials
        # Nobody but this host uses a cluster without nodes, and a loopback address may not be
        # written into the Endpoints of the service "kubernetes".
        endpoints = [] if self.has_nodes else ["--endpoint-reconciler-type=none"]
        return [
            *(str(self.kube), "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            f"--secure-port={self.api_port}",
            f"--tls-cert-file={files.certificate}",
            f"--tls-private-key-file={files.key}",
            f"--token-auth-file={files.tokens}",
            f"--service-account-key-file={files.service_account_key}",
            f"--service-account-signing-key-file={files.service_account_key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP",
            "--profiling=false",
            *endpoints,
        ]

    def controllers_command(self) -> list[str]:
        files = self.credentials
        return [
            *(str(self.kube), "kube-controller-manager"),
            f"--kubeconfig={files.kubeconfig(credentials.CONTROLLER_MANAGER)}",
            f"--service-account-private-key-file={files.service_account_key}",
            f"--root-ca-file={files.certificate}",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--allocate-node-cidrs=false",
            "--node-monitor-period=1s",
            "--node-monitor-grace-period=8s",
            "--horizontal-pod-autoscaler-sync-period=2s",
            "--secure-port=0",
        ]

    def scheduler_command(self) -> list[str]:
        return [
            *(str(self.kube), "kube-scheduler"),
            f"--kubeconfig={self.credentials.kubeconfig(credentials.SCHEDULER)}",
            "--leader-elect=false",
            "--secure-port=0",
        ]
