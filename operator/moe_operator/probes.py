"""HTTP for the kubelet and Prometheus: /healthz, /readyz, /metrics; its own thread, no framework.

Healthy means that this process can still notice and do its work, not merely that it answers:
`problems` returns what is wrong in words, and an empty list is 200. Leadership is not health: a
standby is ready.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

TEXT = "text/plain; charset=utf-8"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
Problems = Callable[[], Sequence[str]]


class Probes:
    """Serves from `start` to `stop` on every address of the pod; port 0 picks a free one."""

    def __init__(
        self, port: int, *, liveness: Problems, readiness: Problems, metrics: Callable[[], bytes]
    ) -> None:
        class Handler(_Handler):
            routes: ClassVar[dict[str, Callable[[], tuple[int, str, bytes]]]] = {
                "/healthz": lambda: _verdict(liveness()),
                "/readyz": lambda: _verdict(readiness()),
                "/metrics": lambda: (200, METRICS, metrics()),
            }

        self._server = ThreadingHTTPServer(("", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    routes: ClassVar[dict[str, Callable[[], tuple[int, str, bytes]]]]
    timeout = 10  # seconds a client may take to send its request

    def do_GET(self) -> None:
        route = self.routes.get(self.path.partition("?")[0])
        status, kind, body = route() if route else (404, TEXT, b"not found\n")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every few seconds: nothing to tell."""


def _verdict(problems: Sequence[str]) -> tuple[int, str, bytes]:
    if not problems:
        return 200, TEXT, b"ok\n"
    return 503, TEXT, "".join(f"{problem}\n" for problem in problems).encode()
