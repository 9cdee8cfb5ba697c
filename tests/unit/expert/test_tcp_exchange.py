"""Bytes over TCP links: any cuts, slow and greedy peers, deadlines, peers that go."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_worker.expert.exchange import ExchangeFailed
from moe_worker.expert.tcp_exchange import TcpExchange
from tests.support import tcp_pairs

SMALL = 4096
"""The kernel's buffers in tests of back-pressure; it doubles them."""


def pattern(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def until(advance: Callable[[], None]) -> None:
    """Again and again, until it raises."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        advance()


def wire(*payloads: bytes) -> bytes:
    return b"".join(struct.pack("<Q", len(payload)) + payload for payload in payloads)


@contextlib.contextmanager
def raw_peer(
    timeout_seconds: float = 20.0, buffer_bytes: int | None = None
) -> Iterator[tuple[TcpExchange, socket.socket]]:
    exchange, far = tcp_pairs.exchange_with_raw_peer(timeout_seconds, buffer_bytes)
    try:
        yield exchange, far
    finally:
        exchange.close()
        far.close()


@contextlib.contextmanager
def group(size: int, **kwargs: float) -> Iterator[list[TcpExchange]]:
    ranks = tcp_pairs.exchanges(size, **kwargs)  # type: ignore[arg-type]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


@settings(max_examples=40)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 7, 8, 9, 300, 5000]), min_size=1, max_size=4),
    room=st.integers(0, 64),
    cuts=st.lists(st.integers(0, 6000), max_size=12),
)
def test_messages_arrive_whole_however_they_are_cut(
    sizes: list[int], room: int, cuts: list[int]
) -> None:
    payloads = [bytes(pattern(size, seed).numpy()) for seed, size in enumerate(sizes)]
    stream, at = wire(*payloads), 0
    with raw_peer() as (exchange, far):
        edges = [*sorted({cut for cut in cuts if cut < len(stream)}), len(stream)]
        for number, payload in enumerate(payloads):
            end = len(wire(*payloads[: number + 1]))
            buffer = torch.full((len(payload) + room,), 0xEE, dtype=torch.uint8)
            transfer = exchange.transfer("data", [], [(1, buffer)])
            while at < end:
                transfer.advance()
                edge = next(e for e in edges if e > at)
                far.sendall(stream[at:edge])
                at = edge
            transfer.wait()
            assert bytes(buffer[: len(payload)].numpy()) == payload
            assert (buffer[len(payload) :] == 0xEE).all(), "nothing of the next message"


@settings(max_examples=15)
@given(sizes=st.lists(st.sampled_from([0, 1, 70_000, 200_000]), min_size=1, max_size=3),
       bites=st.lists(st.integers(1, 60_000), min_size=1, max_size=8))  # fmt: skip
def test_messages_leave_whole_however_slowly_they_are_read(
    sizes: list[int], bites: list[int]
) -> None:
    with raw_peer(buffer_bytes=SMALL) as (exchange, far):
        for seed, size in enumerate(sizes):
            payload = pattern(size, seed)
            transfer = exchange.transfer("data", [(1, payload)], [])
            wanted, got, turn = wire(bytes(payload.numpy())), bytearray(), 0
            while len(got) < len(wanted):
                transfer.advance()
                got += far.recv(bites[turn % len(bites)])
                turn += 1
            transfer.wait()
            assert bytes(got) == wanted


def test_both_may_send_more_than_the_kernels_hold() -> None:
    sent = [pattern(3_000_000, rank) for rank in range(2)]
    got = [torch.empty(3_000_000, dtype=torch.uint8) for _ in range(2)]
    with group(2, buffer_bytes=SMALL) as ranks:

        def swap(rank: int) -> None:
            # Posted apart, as the agreement does: waiting for one moves the other on.
            peer = 1 - rank
            receiving = ranks[rank].transfer("data", [], [(peer, got[rank])])
            sending = ranks[rank].transfer("data", [(peer, sent[rank])], [])
            receiving.wait()
            sending.wait()

        other = threading.Thread(target=swap, args=(1,))
        other.start()
        swap(0)
        other.join(20)
    assert torch.equal(got[0], sent[1])
    assert torch.equal(got[1], sent[0])


def test_a_peer_that_does_not_read_fails_at_the_deadline() -> None:
    with raw_peer(buffer_bytes=SMALL) as (exchange, _):
        transfer = exchange.transfer("data", [(1, pattern(3_000_000))], [])
        with pytest.raises(ExchangeFailed, match=r"rank 1: not complete after 0\.05 s") as caught:
            transfer.wait(0.05)
    assert caught.value.suspects == (1,)


def test_a_peer_that_sends_drop_by_drop_gets_no_more_time() -> None:
    over = threading.Event()
    with raw_peer() as (exchange, far):

        def drip() -> None:
            far.sendall(struct.pack("<Q", 1 << 20))
            while not over.wait(0.001):
                far.sendall(b"x")

        dripping = threading.Thread(target=drip)
        transfer = exchange.transfer("data", [], [(1, torch.empty(1 << 20, dtype=torch.uint8))])
        dripping.start()
        try:
            with pytest.raises(ExchangeFailed, match="not complete"):
                transfer.wait(0.1)
        finally:
            over.set()
            dripping.join(10)


def test_more_than_was_agreed_is_refused_before_it_is_read() -> None:
    with raw_peer() as (exchange, far):
        transfer = exchange.transfer("data", [], [(1, torch.empty(10, dtype=torch.uint8))])
        far.sendall(struct.pack("<Q", 11))
        with pytest.raises(ExchangeFailed, match="sent 11 bytes where 10 were agreed"):
            transfer.wait()


@pytest.mark.parametrize("before", [b"", b"\x05", struct.pack("<Q", 5) + b"abc"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_peer_that_goes_is_noticed_at_once(before: bytes, reset: bool) -> None:
    with raw_peer() as (exchange, far):
        transfer = exchange.transfer("data", [], [(1, torch.empty(5, dtype=torch.uint8))])
        far.sendall(before)
        if reset:
            far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        far.close()
        with pytest.raises(ExchangeFailed, match=r"rank 1: .*[Pp]eer|rank 1: Connection reset"):
            transfer.wait(60.0)


def test_a_peer_that_goes_while_it_is_sent_to_is_noticed_at_once() -> None:
    with raw_peer(buffer_bytes=SMALL) as (exchange, far):
        transfer = exchange.transfer("data", [(1, pattern(3_000_000))], [])
        far.close()
        with pytest.raises(ExchangeFailed) as caught:
            transfer.wait(60.0)
    assert caught.value.suspects == (1,)


def test_looking_for_a_ballot_sees_a_peer_that_is_gone() -> None:
    with group(2) as (here, there):
        listening = here.transfer("control", [], [(1, torch.empty(4, dtype=torch.uint8))])
        listening.advance()
        there.close()
        with pytest.raises(ExchangeFailed):
            until(listening.advance)


def test_who_went_first_is_named_although_others_followed() -> None:
    """Rank 1 goes; rank 2 notices and goes too; rank 0, which waits for 2 alone, names both."""
    with group(3) as ranks:
        receive = torch.empty(4, dtype=torch.uint8)
        waiting = ranks[0].transfer("data", [], [(2, receive)])
        ranks[1].close()
        with pytest.raises(ExchangeFailed):
            ranks[2].transfer("data", [], [(1, receive)]).wait()
        ranks[2].close()
        with pytest.raises(ExchangeFailed) as caught:
            waiting.wait()
    assert caught.value.suspects == (1, 2)


def test_a_peer_that_leaves_disturbs_no_transfer_without_it() -> None:
    with group(3) as ranks:
        mine, theirs = pattern(100), torch.empty(100, dtype=torch.uint8)
        ranks[2].close()
        receiving = ranks[0].transfer("data", [], [(1, theirs)])
        receiving.advance()
        ranks[1].transfer("data", [(0, mine)], []).wait()
        receiving.wait()
    assert torch.equal(mine, theirs)


def test_control_does_not_wait_behind_data() -> None:
    with group(2, buffer_bytes=SMALL) as (here, there):
        here.transfer("data", [(1, pattern(3_000_000))], [])
        ballot, heard = pattern(88), torch.empty(88, dtype=torch.uint8)
        here.transfer("control", [(1, ballot)], []).wait()
        there.transfer("control", [], [(0, heard)]).wait()
    assert torch.equal(ballot, heard)


def test_a_closed_exchange_says_so() -> None:
    with group(2) as (here, _):
        here.close()
        with pytest.raises(ExchangeFailed, match="closed"):
            here.transfer("control", [], [])
