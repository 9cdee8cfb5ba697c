"""Connecting all pairs of a generation: the higher rank dials the lower one, once per channel.

One selector, no thread. Nobody is waited for in turn: a caller that says nothing, too little or
the wrong thing takes one of a bounded number of places for a few seconds and disturbs nobody; when
the places run out the oldest caller goes. Who dials tries again until the meeting's deadline.

Neighbours: `tcp_handshake` is what is said, `moe_worker.membership` opens the door (before it tells
the others that it is there, so that a member that all wait for is one that can be called).
"""

from __future__ import annotations

import errno
import logging
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moe_worker.expert import tcp_handshake
from moe_worker.expert.exchange import Channel, ExchangeFailed
from moe_worker.expert.tcp_handshake import NONCE_BYTES, Party, Refused, Steps

logger = logging.getLogger(__name__)

STRANGERS = 64
"""Callers who have not proven anything yet, besides one per member and channel."""
HANDSHAKE_SECONDS = 5.0
_RETRY_SECONDS = 0.1
_TICK_SECONDS = 0.05
_CHANNELS: tuple[Channel, ...] = ("control", "data")

Ends = dict[tuple[int, Channel], socket.socket]


def open_door(address: str, port: int) -> socket.socket:
    """Listen at this address alone. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((address, port))
        door.listen(1024)
        door.setblocking(False)
    except OSError:
        door.close()
        raise
    return door


@dataclass(eq=False)
class _Talk:
    """A connection that has not proven anything yet."""

    socket: socket.socket
    steps: Steps[object]
    dialed: tuple[int, Channel] | None
    """Whom this rank called; None = it was called."""
    deadline_seconds: float
    sending: bytes = b""
    wanted: int = 0
    heard: bytearray = field(default_factory=bytearray)


class Meeting:
    """One attempt; `run` once."""

    def __init__(
        self,
        party: Party,
        addresses: Sequence[str],
        port: int,
        door: socket.socket,
        check: Callable[[], None],
    ) -> None:
        """
        Args:
            addresses: of all ranks.
            door: listening at this rank's own address; stays the caller's.
            check: called again and again; raises when the meeting is called off.
        """
        self._party, self._addresses, self._port = party, addresses, port
        self._door, self._check = door, check
        self._ends: Ends = {}
        self._talks: dict[_Talk, None] = {}
        """In the order in which they began."""
        ranks = [rank for rank in range(party.size) if rank != party.rank]
        self._missing = {(rank, channel): "" for rank in ranks for channel in _CHANNELS}
        """What became of the last try, per end that is not there yet."""
        self._redial_seconds = {end: 0.0 for end in self._missing if end[0] < party.rank}
        self._places = STRANGERS + 2 * party.size

    def run(self, timeout_seconds: float) -> Ends:
        """Connected, proven sockets to every peer.

        Raises:
            ExchangeFailed: somebody is not connected in time.
        """
        deadline = time.monotonic() + timeout_seconds
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._door, selectors.EVENT_READ)
            try:
                while self._missing:
                    self._check()
                    now = time.monotonic()
                    if now > deadline:
                        raise self._incomplete(timeout_seconds)
                    self._dial_due(now)
                    self._work(_TICK_SECONDS)
                    self._drop_late(time.monotonic())
            except BaseException:
                _close(self._ends.values())
                raise
            finally:
                _close(talk.socket for talk in self._talks)
        return self._ends

    def _incomplete(self, timeout_seconds: float) -> ExchangeFailed:
        told = {rank: reason for (rank, _), reason in self._missing.items()}
        detail = "; ".join(
            f"rank {rank} at {self._addresses[rank]}:{self._port}"
            + (f": {reason}" if reason else "")
            for rank, reason in sorted(told.items())
        )
        return ExchangeFailed(f"not connected after {timeout_seconds:g} s: {detail}", sorted(told))

    def _dial_due(self, now_seconds: float) -> None:
        for end, due in self._redial_seconds.items():
            if end in self._missing and due <= now_seconds:
                # Called again only after this call has ended.
                self._redial_seconds[end] = float("inf")
                self._dial(end)

    def _dial(self, end: tuple[int, Channel]) -> None:
        address = self._addresses[end[0]]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            # Called from the plan's address: the route's own need not be what the others let in.
            connection.bind((self._addresses[self._party.rank], 0))
        except OSError:
            connection.close()
            raise
        steps = tcp_handshake.dial(self._party, *end, secrets.token_bytes(NONCE_BYTES))
        talk = self._begin(connection, steps, end)
        code = connection.connect_ex((address, self._port))
        if code not in (0, errno.EINPROGRESS):
            self._drop(talk, f"{errno.errorcode.get(code, code)}")

    def _work(self, timeout_seconds: float) -> None:
        for key, events in self._selector.select(timeout_seconds):
            talk: _Talk | None = key.data
            if talk is None:
                self._answer_door()
            elif talk in self._talks:
                try:
                    self._go_on(talk, events)
                except (OSError, Refused) as error:
                    self._drop(talk, getattr(error, "strerror", None) or str(error))

    def _answer_door(self) -> None:
        for _ in range(self._places):
            try:
                connection, _ = self._door.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            connection.setblocking(False)
            callers = [talk for talk in self._talks if talk.dialed is None]
            if len(callers) >= self._places:
                self._drop(callers[0], "too many callers")
            nonce = secrets.token_bytes(NONCE_BYTES)
            self._begin(connection, tcp_handshake.accept(self._party, nonce), None)

    def _begin(
        self, connection: socket.socket, steps: Steps[None] | Steps[tuple[int, Channel]],
        dialed: tuple[int, Channel] | None,
    ) -> _Talk:  # fmt: skip
        talk = _Talk(connection, steps, dialed, time.monotonic() + HANDSHAKE_SECONDS)
        talk.sending, talk.wanted = next(steps)
        self._talks[talk] = None
        self._selector.register(connection, _interest(talk), talk)
        return talk

    def _go_on(self, talk: _Talk, events: int) -> None:
        """One step further with what the kernel takes or has. Raises OSError, Refused."""
        if events & selectors.EVENT_WRITE:
            failed = talk.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, errno.errorcode.get(failed, str(failed)))
            talk.sending = talk.sending[talk.socket.send(talk.sending) :]
        elif events & selectors.EVENT_READ:
            # Never a byte more than this step wants: what follows belongs to the exchange.
            piece = talk.socket.recv(talk.wanted - len(talk.heard))
            if not piece:
                raise Refused("it hung up")
            talk.heard += piece
        while not talk.sending and len(talk.heard) == talk.wanted:
            heard, talk.heard = bytes(talk.heard), bytearray()
            try:
                talk.sending, talk.wanted = talk.steps.send(heard)
            except StopIteration as proven:
                self._take(talk, proven.value)
                return
        self._selector.modify(talk.socket, _interest(talk), talk)

    def _take(self, talk: _Talk, caller: tuple[int, Channel] | None) -> None:
        end = talk.dialed or caller
        assert end is not None, "who accepts learns who called"
        self._selector.unregister(talk.socket)
        del self._talks[talk]
        # A member that calls again has given up its earlier call.
        _close([self._ends[end]] if end in self._ends else [])
        self._ends[end] = talk.socket
        self._missing.pop(end, None)

    def _drop(self, talk: _Talk, reason: str) -> None:
        self._selector.unregister(talk.socket)
        del self._talks[talk]
        talk.socket.close()
        if talk.dialed is None:
            logger.debug("a caller was turned away: %s", reason)
        elif talk.dialed in self._missing:
            self._missing[talk.dialed] = reason
            self._redial_seconds[talk.dialed] = time.monotonic() + _RETRY_SECONDS

    def _drop_late(self, now_seconds: float) -> None:
        for talk in [t for t in self._talks if t.deadline_seconds < now_seconds]:
            self._drop(talk, f"it said nothing for {HANDSHAKE_SECONDS:g} s")


def _interest(talk: _Talk) -> int:
    return selectors.EVENT_WRITE if talk.sending else selectors.EVENT_READ


def _close(sockets: Iterable[socket.socket]) -> None:
    for each in sockets:
        each.close()
