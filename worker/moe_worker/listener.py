"""One uvicorn server on a socket that is already bound, as one of two in the same event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import h11
import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

CLOSING_SECONDS = 5
"""For answers under way when the listener closes."""
KEEP_ALIVE_SECONDS = 75
"""Longer than most proxies keep an idle connection: they close it, not we under their feet."""


HEADER_SECONDS = 20.0
"""For the first line and the headers of a request."""


class AddressInUse(OSError):
    """Somebody else listens there."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens for connections; port 0 picks a free one.

    Raises:
        AddressInUse: naming address and port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise AddressInUse(f"can not listen on {host} port {port}: {error.strerror}") from error
    return bound


class ImpatientProtocol(H11Protocol):
    """Closes a connection on which a request has begun whose headers do not come to an end.

    uvicorn itself has a time-out for idle connections only; a body has one in `api.body`.
    """

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        super().connection_lost(exc)

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_watching(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class Listener(uvicorn.Server):
    """Serves `app`; signals are left to the process, which has two of these."""

    def __init__(self, app: Starlette, bound: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=ImpatientProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._bound = bound
        self.listening = asyncio.Event()

    async def run_until_closed(self) -> None:
        """Answers requests until `close`."""
        await self.serve(sockets=[self._bound])

    @property
    def url(self) -> str:
        host, port = self._bound.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    def close(self) -> None:
        """Accept nothing more; `run_until_closed` returns once answers under way are sent."""
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
