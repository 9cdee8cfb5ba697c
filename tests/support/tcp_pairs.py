"""Connected TCP sockets of one process, and exchanges over them without a meeting."""

from __future__ import annotations

import itertools
import socket

from moe_worker.expert.exchange import Channel
from moe_worker.expert.tcp_exchange import TcpExchange

CHANNELS: tuple[Channel, ...] = ("control", "data")


def tcp_pair(buffer_bytes: int | None = None) -> tuple[socket.socket, socket.socket]:
    """Two ends of one connection; `buffer_bytes` makes the kernel's buffers small."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        if buffer_bytes is not None:
            # Taken over by the sockets that it accepts.
            door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            door.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near = socket.socket()
        if buffer_bytes is not None:
            near.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near.connect(door.getsockname())
        far, _ = door.accept()
    return near, far


def exchanges(
    size: int, timeout_seconds: float = 20.0, buffer_bytes: int | None = None
) -> list[TcpExchange]:
    """A connected group in one process."""
    ends: list[dict[tuple[int, Channel], socket.socket]] = [{} for _ in range(size)]
    for low, high in itertools.combinations(range(size), 2):
        for channel in CHANNELS:
            ends[low][high, channel], ends[high][low, channel] = tcp_pair(buffer_bytes)
    return [TcpExchange(rank, size, ends[rank], timeout_seconds) for rank in range(size)]


def exchange_with_raw_peer(
    timeout_seconds: float = 20.0, buffer_bytes: int | None = None
) -> tuple[TcpExchange, socket.socket]:
    """Rank 0 of two, and its peer's end of the data channel for the test to play with."""
    control, _held = tcp_pair()
    data, far = tcp_pair(buffer_bytes)
    _held.close()
    ends: dict[tuple[int, Channel], socket.socket] = {(1, "control"): control, (1, "data"): data}
    return TcpExchange(0, 2, ends, timeout_seconds), far
