"""Messages over one socket to one peer: as many bytes as the kernel takes or has, never waiting.

A message is its length (8 bytes) and its bytes, read straight into the receiver's buffer and
written straight from the sender's, so nothing here grows: what the peer does not read stays in
its kernel's bounded buffer, and then in ours, and then `push` stops. One message each way at a
time.

Neighbour: `tcp_channel` says when to push and pull, and watches the deadline.
"""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


class LinkBroken(Exception):
    """The connection is of no use any more."""


class Message:
    """One buffer on its way, in either direction."""

    __slots__ = ("done", "header", "moved", "payload")

    def __init__(self, header: bytes | bytearray, payload: memoryview) -> None:
        self.header, self.payload = memoryview(header), payload
        self.moved = 0
        """Bytes of header and payload that are over."""
        self.done = False


class Link:
    def __init__(self, connection: socket.socket, peer: int) -> None:
        """Takes over a connected socket."""
        connection.setblocking(False)
        # Every message is awaited by the peer: none may wait for company.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer, self.descriptor = peer, connection.fileno()
        self.outgoing: Message | None = None
        self.incoming: Message | None = None
        self._socket = connection
        self._length_in = bytearray(_LENGTH.size)

    def send(self, payload: memoryview) -> Message:
        """Begin to send; the buffer must not change until the message is done."""
        assert self.outgoing is None, "one message to a peer at a time"
        self.outgoing = Message(_LENGTH.pack(len(payload)), payload)
        return self.outgoing

    def receive(self, payload: memoryview) -> Message:
        """Await a message that may be shorter than the buffer."""
        assert self.incoming is None, "one message from a peer at a time"
        self.incoming = Message(self._length_in, payload)
        return self.incoming

    def push(self) -> None:
        """Give the kernel what it takes of the outgoing message. Raises LinkBroken."""
        message = self.outgoing
        while message is not None and not message.done:
            ahead = message.moved - _LENGTH.size
            if ahead < 0:
                parts = [message.header[message.moved :], message.payload]
            else:
                parts = [message.payload[ahead:]]
            try:
                message.moved += self._socket.sendmsg(parts)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkBroken(error.strerror or str(error)) from error
            message.done = message.moved == _LENGTH.size + len(message.payload)
        self.outgoing = None

    def pull(self) -> None:
        """Take what the kernel has of the incoming message, and nothing of the next one.

        Raises:
            LinkBroken: closed, reset, or the message is longer than its buffer.
        """
        message = self.incoming
        while message is not None and not message.done:
            ahead = message.moved - _LENGTH.size
            room = message.header[message.moved :] if ahead < 0 else message.payload[ahead:]
            try:
                count = self._socket.recv_into(room)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                raise LinkBroken(error.strerror or str(error)) from error
            if count == 0:
                raise LinkBroken("connection closed by peer")
            message.moved += count
            if ahead < 0 and message.moved == _LENGTH.size:
                self._begin(message)
            message.done = message.moved == _LENGTH.size + len(message.payload)
        self.incoming = None

    def close(self) -> None:
        self._socket.close()

    @staticmethod
    def _begin(message: Message) -> None:
        (length,) = _LENGTH.unpack(message.header)
        if length > len(message.payload):
            raise LinkBroken(f"sent {length} bytes where {len(message.payload)} were agreed")
        message.payload = message.payload[:length]
