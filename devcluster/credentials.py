"""Who may talk to the API server: a certificate for the server, a token for each client.

The tokens are in a file that only the server and root's components read. Fit for a cluster whose
addresses exist on this machine alone, and for nothing else.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from devcluster.command import run

ADMIN = "admin"
CONTROLLER_MANAGER = "controller-manager"
SCHEDULER = "scheduler"
PROXY = "proxy"


@dataclass(frozen=True)
class Credentials:
    """The files of one instance's credentials."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The API server's self-signed certificate, which is also the authority for clients."""
        return self.folder / "api.crt"

    @property
    def key(self) -> Path:
        return self.folder / "api.key"

    @property
    def service_account_key(self) -> Path:
        return self.folder / "service-accounts.key"

    @property
    def tokens(self) -> Path:
        return self.folder / "tokens.csv"

    def kubeconfig(self, client: str) -> Path:
        return self.folder / f"{client}.kubeconfig"


def create(folder: Path, host: str, url: str, nodes: Sequence[str]) -> str:
    """Write all credentials below `folder`; return the administrator's token."""
    credentials = Credentials(folder)
    folder.mkdir(mode=0o700)
    tokens = {client: secrets.token_hex(16) for client in users(nodes)}
    credentials.tokens.touch(mode=0o600)
    credentials.tokens.write_text(token_file(tokens, nodes))
    _create_certificate(credentials, host)
    authority = credentials.certificate.read_text()
    for client, token in tokens.items():
        credentials.kubeconfig(client).touch(mode=0o600)
        credentials.kubeconfig(client).write_text(kubeconfig(url, authority, token))
    return tokens[ADMIN]


def users(nodes: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Client → (user name, group), as the built-in roles of Kubernetes know them."""
    return {
        ADMIN: ("admin", "system:masters"),
        CONTROLLER_MANAGER: ("system:kube-controller-manager", ""),
        SCHEDULER: ("system:kube-scheduler", ""),
        PROXY: ("system:kube-proxy", ""),
        **{node: (f"system:node:{node}", "system:nodes") for node in nodes},
    }


def token_file(tokens: Mapping[str, str], nodes: Sequence[str]) -> str:
    """The lines `token,user,uid,"group"` that the API server reads."""
    lines = (
        f'{tokens[client]},{user},{user},"{group}"\n'
        for client, (user, group) in users(nodes).items()
    )
    return "".join(lines)


def kubeconfig(url: str, authority: str, token: str) -> str:
    """A kubeconfig that needs no other file. JSON is YAML."""
    cluster = {
        "server": url,
        "certificate-authority-data": base64.b64encode(authority.encode()).decode(),
    }
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "devcluster",
        "clusters": [{"name": "devcluster", "cluster": cluster}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "devcluster", "context": {"cluster": "devcluster", "user": "user"}}],
    }
    return json.dumps(document, indent=1)


def _create_certificate(credentials: Credentials, host: str) -> None:
    names = f"IP:{host},IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
    elliptic = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    subject = ["-subj", "/CN=devcluster", "-addext", f"subjectAltName={names}"]
    # Strict verifiers (Python 3.13) refuse an authority that does not say it may sign.
    usage = ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    files = ["-keyout", str(credentials.key), "-out", str(credentials.certificate)]
    run("openssl", "req", "-x509", *elliptic, "-days", "365", *subject, *usage, *files)
    curve = ["-name", "prime256v1", "-genkey", "-noout"]
    run("openssl", "ecparam", *curve, "-out", credentials.service_account_key)
