"""A few calls to the API server, without any library and without the start-up time of kubectl."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from devcluster.errors import ClusterError

MERGE_PATCH = "application/merge-patch+json"


class ApiError(ClusterError):
    """The API server refused a request."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status


@dataclass(frozen=True)
class Api:
    """The API server as the administrator sees it."""

    url: str
    token: str
    authority: Path

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        content_type: str = "application/json",
        timeout_seconds: float = 10,
    ) -> Any:
        """Return the decoded answer. Raises ApiError when refused, OSError when unreachable."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        try:
            with self._opener.open(request, timeout=timeout_seconds) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(method, path, error.code, _message(error.read())) from error
        return json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def patch(self, path: str, body: object) -> Any:
        return self.request("PATCH", path, body, content_type=MERGE_PATCH)

    def exists(self, path: str) -> bool:
        """Whether there is such an object; raises ApiError for any other refusal than 404."""
        try:
            self.get(path)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def is_ready(self) -> bool:
        """Whether the API server says that it is ready to serve."""
        try:
            return bool(self.request("GET", "/readyz", timeout_seconds=2) == "ok")
        except (OSError, ApiError):
            return False

    def unready_nodes(self, wanted: set[str]) -> set[str]:
        """Those of the wanted nodes that are not there or not Ready, or not known to be."""
        try:
            nodes = self.get("/api/v1/nodes")["items"]
        except OSError:  # a busy machine's server may not answer in time
            return wanted
        return wanted - {node["metadata"]["name"] for node in nodes if is_ready(node)}

    @cached_property
    def _opener(self) -> urllib.request.OpenerDirector:
        # The certificate is the authority. No proxy: the address exists on this machine only.
        context = ssl.create_default_context(cafile=str(self.authority))
        return urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )


def is_ready(thing: dict[str, Any]) -> bool:
    """Whether a node or pod has the condition Ready."""
    conditions = thing.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _message(body: bytes) -> str:
    """The text of a Status object, or whatever else was answered."""
    try:
        return str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")[:500]
