"""A running cluster, written down so that any later command can find and use it."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devcluster import credentials, processes
from devcluster.api import Api
from devcluster.build import Binaries
from devcluster.controlplane import ControlPlane
from devcluster.errors import CommandFailed, NotRunning
from devcluster.instance import Instance
from devcluster.network import Addresses
from devcluster.node import Node
from devcluster.spec import ClusterSpec


@dataclass(frozen=True)
class Cluster:
    """One instance: what it was asked to be, and where it runs."""

    instance: Instance
    spec: ClusterSpec
    binaries: Binaries
    addresses: Addresses | None
    ports: tuple[int, int, int]
    """API server, etcd for clients, etcd for peers."""
    token: str
    """The administrator's."""

    @classmethod
    def load(cls, name: str) -> Cluster:
        """The cluster that `up` has brought up; raises NotRunning when there is none."""
        instance = Instance.named(name)
        try:
            document = json.loads(instance.record.read_text())
        except FileNotFoundError as error:
            raise NotRunning(
                f"no cluster {name!r}; start it with `python3 -m devcluster up --name {name}`"
            ) from error
        return cls.from_json(instance, document)

    def save(self) -> None:
        """Write the record: the mark that everything is ready."""
        unfinished = self.instance.record.with_suffix(".unfinished")
        unfinished.touch(mode=0o600)
        unfinished.write_text(json.dumps(self.to_json(), indent=1))
        unfinished.rename(self.instance.record)

    @property
    def name(self) -> str:
        return self.instance.name

    @property
    def url(self) -> str:
        return self.control_plane.url

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.control_plane.credentials.kubeconfig(credentials.ADMIN)

    @property
    def authority(self) -> Path:
        """The certificate that clients check the API server with."""
        return self.control_plane.credentials.certificate

    @property
    def discovery_cache(self) -> Path:
        """Where kubectl and helm remember what the API server offers, instead of in ~/.kube."""
        return self.instance.state / "discovery-cache"

    @cached_property
    def api(self) -> Api:
        return Api(self.url, self.token, self.authority)

    @property
    def control_plane(self) -> ControlPlane:
        return ControlPlane(
            self.instance.state,
            self.binaries.kube,
            self.addresses.host if self.addresses else "127.0.0.1",
            *self.ports,
            has_nodes=bool(self.spec.nodes),
        )

    @property
    def nodes(self) -> list[Node]:
        if self.addresses is None:
            return []
        return [
            Node(
                self.instance,
                self.addresses,
                self.binaries.kube,
                spec.name,
                number,
                len(self.spec.nodes),
            )
            for number, spec in enumerate(self.spec.nodes, 1)
        ]

    def node(self, name: str) -> Node:
        """Raises NotRunning when the cluster has no such node."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise NotRunning(f"cluster {self.name!r} has no node {name!r}")

    @property
    def process_names(self) -> list[str]:
        """All processes that must run, without the containers."""
        of_nodes = [name for node in self.nodes for name in node.process_names]
        return [*self.control_plane.process_names, *of_nodes]

    def problems(self) -> list[str]:
        """What keeps this cluster from being healthy; empty when it is."""
        state = self.instance.state
        ended = [name for name in self.process_names if processes.pid_of(state, name) is None]
        if ended:
            return [f"{name} has ended" for name in ended]
        if not self.api.is_ready():
            return ["the API server is not ready"]
        unready = self.api.unready_nodes({node.name for node in self.spec.nodes})
        return [f"{name} is not Ready" for name in sorted(unready)]

    def environment(self) -> dict[str, str]:
        """Environment variables with which kubectl, helm and clients use this cluster."""
        return {
            **os.environ,
            "KUBECACHEDIR": str(self.discovery_cache),
            "KUBECONFIG": str(self.kubeconfig),
            "PATH": f"{self.binaries.bin}:{os.environ.get('PATH', os.defpath)}",
            # The addresses exist on this machine only.
            "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), self._host])),
        }

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Run kubectl as the administrator and return its output; raises CommandFailed."""
        return self._run("kubectl", *arguments, stdin=stdin)

    def helm(self, *arguments: str) -> str:
        """Run helm as the administrator and return its output; raises CommandFailed."""
        return self._run("helm", *arguments, stdin=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "spec": self.spec.to_json(),
            "binaries": str(self.binaries.folder),
            "slice": self.addresses.slice_index if self.addresses else None,
            "ports": list(self.ports),
            "token": self.token,
        }

    @classmethod
    def from_json(cls, instance: Instance, document: dict[str, Any]) -> Cluster:
        return cls(
            instance,
            ClusterSpec.from_json(document["spec"]),
            Binaries(Path(document["binaries"])),
            None if document["slice"] is None else Addresses(document["slice"]),
            tuple(document["ports"]),
            document["token"],
        )

    @property
    def _host(self) -> str:
        return self.control_plane.host

    def _run(self, program: str, *arguments: str, stdin: str | None) -> str:
        argv = [str(self.binaries.bin / program), *arguments]
        done = subprocess.run(
            argv,
            env=self.environment(),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise CommandFailed(f"`{program} {' '.join(arguments)}`: {said}")
        return done.stdout
