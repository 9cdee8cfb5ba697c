"""What both ends say before they trust a connection: alterations, strangers, old proofs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_worker.expert.tcp_handshake import Party, Refused, Steps, accept, dial, key_of

SESSION = bytes(range(32))
LOWER = Party(key_of("secret"), 7, SESSION, rank=0, size=3)
HIGHER = replace(LOWER, rank=2)
TALK_BYTES = 82 + 64 + 32 + 1
"""Hello, answer, proof, taken."""
NONCES = b"d" * 32, b"a" * 32


def talk(dialer: Steps[Any], acceptor: Steps[Any], alter: dict[int, int] | None = None) -> Any:
    """Let both speak until both are through; `alter` flips bits: byte of the whole talk → mask.

    Returns what the acceptor learnt. Raises what either end raises.
    """
    flips, spoken, learnt = alter or {}, 0, None
    streams = {id(dialer): bytearray(), id(acceptor): bytearray()}
    steps = {id(dialer): dialer, id(acceptor): acceptor}
    other = {id(dialer): id(acceptor), id(acceptor): id(dialer)}
    pending = {name: next(generator) for name, generator in steps.items()}
    unsent = set(pending)
    while pending:
        moved = False
        for name in list(pending):
            sending, wanted = pending[name]
            if name in unsent:
                unsent.discard(name)
                for byte in sending:
                    streams[other[name]].append(byte ^ flips.get(spoken, 0))
                    spoken += 1
                moved = True
            if len(streams[name]) >= wanted:
                heard = bytes(streams[name][:wanted])
                del streams[name][:wanted]
                moved = True
                try:
                    pending[name] = steps[name].send(heard)
                    unsent.add(name)
                except StopIteration as end:
                    del pending[name]
                    learnt = end.value or learnt
        assert moved, "both wait for each other"
    assert not any(streams.values()), "every byte said was wanted"
    return learnt


@pytest.mark.parametrize("channel", ["control", "data"])
def test_members_find_each_other(channel: Any) -> None:
    dialer, acceptor = dial(HIGHER, 0, channel, NONCES[0]), accept(LOWER, NONCES[1])
    assert talk(dialer, acceptor) == (2, channel)


@given(position=st.integers(0, 2**16), mask=st.integers(1, 255))
def test_no_altered_byte_goes_unnoticed(position: int, mask: int) -> None:
    dialer, acceptor = dial(HIGHER, 0, "data", NONCES[0]), accept(LOWER, NONCES[1])
    with pytest.raises(Refused):
        talk(dialer, acceptor, {position % TALK_BYTES: mask})


@pytest.mark.parametrize(
    ("dialer", "reason"),
    [
        (replace(HIGHER, generation=6), "wants generation 6, this is 7"),
        (replace(HIGHER, session=b"x" * 32), "another attempt or plan"),
        (replace(HIGHER, rank=3), "rank 3"),
        (replace(HIGHER, rank=0), "rank 0"),
        (replace(HIGHER, key=key_of("other")), "secret"),
    ],
)
def test_who_does_not_belong_here_is_refused(dialer: Party, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        talk(dial(dialer, 0, "data", NONCES[0]), accept(LOWER, NONCES[1]))


def test_a_call_for_another_rank_is_refused() -> None:
    acceptor = accept(replace(LOWER, rank=1), NONCES[1])
    with pytest.raises(Refused, match="rank 2 has nothing to ask of rank 0 here"):
        talk(dial(HIGHER, 0, "data", NONCES[0]), acceptor)


def test_an_acceptor_without_the_secret_learns_no_proof_of_the_dialer() -> None:
    dialer = dial(HIGHER, 0, "data", NONCES[0])
    _, wanted = next(dialer)
    with pytest.raises(Refused, match="secret"):
        dialer.send(bytes(wanted))


def test_what_was_said_once_opens_no_second_connection() -> None:
    dialer, acceptor = dial(HIGHER, 0, "data", NONCES[0]), accept(LOWER, NONCES[1])
    hello, _ = next(dialer)
    next(acceptor)
    answer, _ = acceptor.send(hello)
    proof, _ = dialer.send(answer)
    again = accept(LOWER, b"b" * 32)
    next(again)
    again.send(hello)
    with pytest.raises(Refused, match="secret"):
        again.send(proof)


def test_a_proof_shown_to_its_maker_is_none() -> None:
    acceptor = accept(LOWER, NONCES[1])
    next(acceptor)
    hello, _ = next(dial(HIGHER, 0, "data", NONCES[0]))
    answer, wanted = acceptor.send(hello)
    with pytest.raises(Refused, match="secret"):
        acceptor.send(answer[-wanted:])
