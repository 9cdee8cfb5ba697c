"""The links of one channel to all peers: transfers over them, in the thread that waits.

No thread and no queue of its own. Sends begin when they are posted and go on, with all that is
posted on the channel, while anybody waits: two ranks that send to each other more than the kernels
hold do not block each other. A failure names every peer that is gone by then: whoever fails closes
at once, and the first one must not go under in what follows from it.

Neighbours: `tcp_link` moves bytes of one socket, `tcp_exchange` has one channel for control and one
for data, so that an agreement never waits behind rows.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

from moe_worker.expert.exchange import Channel, PeerBuffers, Transfer, failure
from moe_worker.expert.tcp_link import Link, LinkBroken, Message

_GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR


class TcpChannel:
    """Used by one thread at a time."""

    def __init__(self, channel: Channel, links: Sequence[Link], timeout_seconds: float) -> None:
        """Takes over the links, one per peer."""
        self._channel, self._timeout_seconds = channel, timeout_seconds
        self._links = {link.peer: link for link in links}
        self._by_descriptor = {link.descriptor: link for link in links}
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        """Events asked for, per descriptor. An idle link is not watched: its peer may leave."""

    def post(self, sends: PeerBuffers, receives: PeerBuffers) -> Transfer:
        """Begin all. Raises ExchangeFailed."""
        messages: list[tuple[int, Message]] = []
        failed: dict[int, str] = {}
        for peer, buffer in receives:
            link = self._links[peer]
            messages.append((peer, link.receive(buffer.numpy().data)))
            self._watch(link, self._watched.get(link.descriptor, 0) | select.POLLIN)
        for peer, buffer in sends:
            link = self._links[peer]
            messages.append((peer, link.send(buffer.numpy().data)))
            self._move(link, 0, failed)
        if failed:
            self._fail(failed)
        return _Posted(self, messages, self._timeout_seconds)

    def advance(self, timeout_seconds: float) -> None:
        """Move what can be moved, waiting at most so long for the first of it. Raises
        ExchangeFailed."""
        failed: dict[int, str] = {}
        for descriptor, event in self._poll.poll(math.ceil(timeout_seconds * 1e3)):
            self._move(self._by_descriptor[descriptor], event, failed)
        if failed:
            self._fail(failed)

    def late(self, peers: Iterable[int], limit_seconds: float) -> NoReturn:
        """Raise ExchangeFailed for peers that did not do their part in time."""
        self._fail(dict.fromkeys(peers, f"not complete after {limit_seconds:g} s"))

    def close(self) -> None:
        for link in self._links.values():
            self._watch(link, 0)
            link.close()

    def _move(self, link: Link, event: int, failed: dict[int, str]) -> None:
        try:
            if event & ~select.POLLOUT:
                link.pull()
            if link.outgoing is not None:
                if event & _GONE:
                    # It cannot have read what has not been sent yet.
                    raise LinkBroken("connection closed by peer")
                link.push()
        except LinkBroken as error:
            failed[link.peer] = str(error)
        wanted = select.POLLIN if link.incoming is not None else 0
        if link.outgoing is not None:
            wanted |= select.POLLOUT | select.POLLRDHUP
        self._watch(link, wanted)

    def _watch(self, link: Link, wanted: int) -> None:
        watched = self._watched.get(link.descriptor, 0)
        if wanted == watched:
            return
        if not wanted:
            self._poll.unregister(link.descriptor)
        else:
            self._poll.register(link.descriptor, wanted)
        self._watched[link.descriptor] = wanted

    def _fail(self, failed: dict[int, str]) -> NoReturn:
        gone = dict.fromkeys(self._gone(), "connection closed by peer")
        raise failure(self._channel, gone | failed)

    def _gone(self) -> list[int]:
        """Peers that have closed, or whose kernel has."""
        poll = select.poll()
        for link in self._links.values():
            poll.register(link.descriptor, select.POLLRDHUP)
        return [self._by_descriptor[fd].peer for fd, event in poll.poll(0) if event & _GONE]


class _Posted:
    """One transfer on its way."""

    def __init__(
        self, channel: TcpChannel, messages: list[tuple[int, Message]], timeout_seconds: float
    ) -> None:
        self._channel, self._messages = channel, messages
        self._timeout_seconds = timeout_seconds

    def advance(self) -> None:
        if not self._done():
            self._channel.advance(0.0)

    def wait(self, timeout_seconds: float | None = None) -> None:
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        while not self._done():
            left = deadline - time.monotonic()
            self._channel.advance(max(left, 0.0))
            # Also when something came: a peer that sends drop by drop gets no more time.
            if left <= 0 and not self._done():
                self._channel.late({p for p, m in self._messages if not m.done}, limit)

    def _done(self) -> bool:
        messages = self._messages
        while messages and messages[-1][1].done:
            messages.pop()
        return not messages
