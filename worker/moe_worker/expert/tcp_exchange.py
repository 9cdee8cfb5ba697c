"""`Exchange` over plain TCP sockets: what ranks on CPUs use.

Two connections to every peer, one per channel. Nothing is copied on the way and no thread works
beside the caller's, which is what makes an exchange cost tens of microseconds where gloo's takes
hundreds. A peer whose process ends is noticed at once, since the kernel closes its sockets.

Neighbours: `tcp_meeting` connects, `tcp_channel` transfers.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from moe_worker.expert.exchange import Channel, ExchangeFailed, PeerBuffers, Transfer
from moe_worker.expert.tcp_channel import TcpChannel
from moe_worker.expert.tcp_link import Link


class TcpExchange:
    """Used by one thread at a time."""

    whole_buffers = False

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Mapping[tuple[int, Channel], socket.socket],
        timeout_seconds: float,
    ) -> None:
        """Takes over the connections, one per peer and channel."""
        self.rank, self.size = rank, size
        self._channels = {
            channel: TcpChannel(
                channel,
                [Link(s, peer) for (peer, which), s in connections.items() if which == channel],
                timeout_seconds,
            )
            for channel in ("control", "data")
        }
        self._closed = False

    def transfer(self, channel: Channel, sends: PeerBuffers, receives: PeerBuffers) -> Transfer:
        if self._closed:
            raise ExchangeFailed("the exchange is closed", ())
        return self._channels[channel].post(sends, receives)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for channel in self._channels.values():
                channel.close()
