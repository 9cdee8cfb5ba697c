"""One request to the API server: its turn under the rate limit, its answer or an error by kind.

`cluster` gives it the `Transport` (the client's connections) and builds on it; `lease` uses it
without a line to wait in.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from moe_operator.errors import Missing, from_answer
from moe_operator.resources import Resource
from moe_operator.settings import ClientSettings
from moe_operator.throttle import TokenBucket

Manifest = dict[str, Any]
"""An object in wire form."""
JSON = "application/json"


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    content: bytes


class Transport(Protocol):
    """Sends one request; raises errors.Unavailable when there is no answer at all."""

    def __call__(
        self, method: str, path: str, query: Mapping[str, str], body: Manifest | None,
        content_type: str, timeout_seconds: tuple[float, float],
    ) -> Answer: ...  # fmt: skip


class ApiServer:
    """Thread-safe, rate-limited."""

    def __init__(
        self,
        send: Transport,
        settings: ClientSettings,
        monotonic: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._send, self._settings, self._sleep = send, settings, sleep
        self._bucket = TokenBucket(settings.requests_per_second, settings.burst, monotonic)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Manifest | None = None,
        content_type: str = JSON,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """Body of a 2xx answer. With `timeout_seconds` it does not wait for its turn (the lease).

        Raises:
            errors.OperatorError: by status (`errors.from_answer`); Unavailable without an answer.
        """
        if timeout_seconds is None:
            self._sleep(self._bucket.reserve())
            timeouts = (
                self._settings.connect_timeout_seconds, self._settings.read_timeout_seconds
            )  # fmt: skip
        else:
            timeouts = (timeout_seconds, timeout_seconds)
        answer = self._send(method, path, query or {}, body, content_type, timeouts)
        if 200 <= answer.status < 300:
            return answer.content
        raise from_answer(f"{method} {path}", answer.status, answer.headers, answer.content)

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Manifest | None:
        """The object, or None when there is none."""
        try:
            found: Manifest = json.loads(self.request("GET", path, query=query))
        except Missing:
            return None
        return found

    def list(self, resource: Resource, namespace: str | None, selector: str) -> Iterator[Manifest]:
        """Every object that matches, page by page, with apiVersion and kind filled in."""
        query = {"limit": str(self._settings.list_page)}
        if selector:
            query["labelSelector"] = selector
        while True:
            page = json.loads(self.request("GET", resource.path(namespace), query=query))
            kind = str(page["kind"]).removesuffix("List")
            for item in page.get("items") or []:
                yield {"apiVersion": page["apiVersion"], "kind": kind, **item}
            following = page.get("metadata", {}).get("continue")
            if not following:
                return
            query["continue"] = following
