"""All pairs find each other, whoever else comes to the door."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from moe_worker.expert import tcp_handshake, tcp_meeting
from moe_worker.expert.exchange import ExchangeFailed
from moe_worker.expert.tcp_handshake import Party, key_of
from moe_worker.expert.tcp_meeting import Ends, Meeting, open_door
from tests.support.until import until
from tests.support.worker_processes import free_network

PORT = 8002
SESSION = b"s" * 32


class Away(Exception):
    """The meeting was called off."""


class Place:
    """A loopback network of ranks with open doors; each rank's meeting in a thread of its own."""

    def __init__(self, size: int) -> None:
        network = free_network()
        self.addresses = [f"{network}.{2 + rank}" for rank in range(size)]
        self.doors = [open_door(address, PORT) for address in self.addresses]
        self.away = threading.Event()
        self._threads = ThreadPoolExecutor(size)
        self._meetings: list[Future[Ends]] = []

    def party(self, rank: int, secret: str = "secret", generation: int = 1) -> Party:
        return Party(key_of(secret), generation, SESSION, rank, len(self.addresses))

    def meet(self, party: Party, timeout_seconds: float = 20.0) -> Future[Ends]:
        meeting = Meeting(party, self.addresses, PORT, self.doors[party.rank], self._check)
        self._meetings.append(self._threads.submit(meeting.run, timeout_seconds))
        return self._meetings[-1]

    def call(self, rank: int) -> socket.socket:
        return socket.create_connection((self.addresses[rank], PORT), 20.0)

    def close(self) -> None:
        self.away.set()
        self._threads.shutdown()
        for meeting in self._meetings:
            if meeting.exception() is None:
                for end in meeting.result().values():
                    end.close()
        for door in self.doors:
            door.close()

    def _check(self) -> None:
        if self.away.is_set():
            raise Away


@contextlib.contextmanager
def place(size: int) -> Iterator[Place]:
    here = Place(size)
    try:
        yield here
    finally:
        here.close()


def hung_up(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def assert_connected(ends: list[Ends]) -> None:
    """Every end leads to the rank and channel that it is filed under."""
    for rank, mine in enumerate(ends):
        assert len(mine) == 2 * (len(ends) - 1)
        for (peer, channel), end in mine.items():
            assert end.getpeername() == ends[peer][rank, channel].getsockname()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_every_pair_is_connected_on_both_channels(size: int) -> None:
    with place(size) as here:
        meetings = [here.meet(here.party(rank)) for rank in reversed(range(size))]
        assert_connected([meeting.result(20) for meeting in reversed(meetings)])


def test_two_groups_meet_at_once() -> None:
    with place(3) as here, place(3) as there:
        meetings = [[p.meet(p.party(rank)) for rank in range(3)] for p in (here, there)]
        for group in meetings:
            assert_connected([meeting.result(20) for meeting in group])


def silent(stranger: socket.socket) -> None:
    """Says nothing."""


def half(stranger: socket.socket) -> None:
    stranger.sendall(b"MOEX\x01")


def garbage(stranger: socket.socket) -> None:
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 100)


def resetting(stranger: socket.socket) -> None:
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()


@pytest.mark.parametrize("stranger", [silent, half, garbage, resetting])
def test_strangers_keep_nobody_from_meeting(stranger: Callable[[socket.socket], None]) -> None:
    with place(2) as here, contextlib.ExitStack() as stack:
        # As many as there are places and more, all before the member comes.
        callers = [stack.enter_context(here.call(0)) for _ in range(tcp_meeting.STRANGERS + 20)]
        for caller in callers:
            stranger(caller)
        first = here.meet(here.party(0))
        second = here.meet(here.party(1))
        assert_connected([first.result(20), second.result(20)])
        for caller in callers:
            assert caller.fileno() < 0 or hung_up(caller), "no stranger is kept"


def test_the_oldest_caller_goes_when_the_places_run_out() -> None:
    with place(2) as here, contextlib.ExitStack() as stack:
        here.meet(here.party(0))
        places = tcp_meeting.STRANGERS + 2 * 2
        callers = [stack.enter_context(here.call(0)) for _ in range(places + 1)]
        assert hung_up(callers[0])
        callers[1].setblocking(False)
        with pytest.raises(BlockingIOError):
            callers[1].recv(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"generation": 2}, "wants generation 2, this is 1"),
        ({"session": b"t" * 32}, "another attempt or plan"),
    ],
)
def test_a_member_of_another_generation_is_turned_away(
    change: dict[str, object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with place(2) as here:
        first = here.meet(here.party(0))
        other = here.meet(replace(here.party(1), **change), 0.3)  # type: ignore[arg-type]
        with pytest.raises(ExchangeFailed, match=r"rank 0 at .*:8002: it hung up") as caught:
            other.result(20)
        assert caught.value.suspects == (0,)
        right = here.meet(here.party(1))
        assert_connected([first.result(20), right.result(20)])
    assert reason in caplog.text


def test_a_member_with_another_secret_is_turned_away_by_both() -> None:
    with place(2) as here:
        first = here.meet(here.party(0), 0.6)
        other = here.meet(here.party(1, secret="other"), 0.3)
        with pytest.raises(ExchangeFailed, match="does not know the group's secret"):
            other.result(20)
        with pytest.raises(ExchangeFailed, match=r"not connected after 0\.6 s: rank 1 at"):
            first.result(20)


def test_who_does_not_come_is_named() -> None:
    with place(3) as here:
        here.doors[0].close()
        meetings = [here.meet(here.party(rank), 0.5) for rank in (1, 2)]
        for meeting in meetings:
            with pytest.raises(ExchangeFailed, match=r"rank 0 at .*ECONNREFUSED") as caught:
                meeting.result(20)
            assert caught.value.suspects == (0,)


def test_a_meeting_is_called_off_at_once() -> None:
    with place(2) as here:
        waiting = here.meet(here.party(0), 600.0)
        here.away.set()
        with pytest.raises(Away):
            waiting.result(20)


def test_a_member_that_calls_again_replaces_its_former_call() -> None:
    with place(2) as here:
        first = here.meet(here.party(0))
        ends = []
        for _ in range(2):
            caller = here.call(0)
            steps = tcp_handshake.dial(here.party(1), 0, "control", b"n" * 32)
            sending, wanted = next(steps)
            with contextlib.suppress(StopIteration):
                while True:
                    caller.sendall(sending)
                    sending, wanted = steps.send(caller.recv(wanted, socket.MSG_WAITALL))
            ends.append(caller)
        until(lambda: hung_up(ends[0]), "the first call is closed")
        second = here.meet(here.party(1))
        assert len(first.result(20)) == len(second.result(20)) == 2
        for end in ends:
            end.close()


def test_a_door_in_use_is_an_error_with_nothing_left_open() -> None:
    with place(1) as here, pytest.raises(OSError, match="in use"):
        open_door(here.addresses[0], PORT)
