"""A server that speaks bytes: scripts decide what it answers, and misbehave as they like."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Script = Callable[[socket.socket, int], None]
"""(connection whose request has been read, index of the request) → writes the answer. The
connection is closed afterwards."""
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
WAIT_SECONDS = 30.0


class RawServer:
    def __init__(self, script: Script) -> None:
        self.requests: list[bytes] = []
        self._script = script
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        self._closed.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive(), "a connection did not end"

    def stay_silent(self, connection: socket.socket, index: int) -> None:
        """A script: says nothing until the client leaves."""
        while connection.recv(65536):
            pass

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._answer, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(ConnectionError):
            connection.settimeout(WAIT_SECONDS)
            request = _read_request(connection)
            with self._lock:
                index = len(self.requests)
                self.requests.append(request)
            self._script(connection, index)


def _read_request(connection: socket.socket) -> bytes:
    received = b""
    while b"\r\n\r\n" not in received:
        received += _more(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            while len(body) < int(value):
                body += _more(connection)
    return head + b"\r\n\r\n" + body


def _more(connection: socket.socket) -> bytes:
    received = connection.recv(65536)
    if not received:
        raise ConnectionResetError("the client left before its request was whole")
    return received


@contextmanager
def raw_server(script: Script) -> Iterator[RawServer]:
    server = RawServer(script)
    try:
        yield server
    finally:
        server.close()
