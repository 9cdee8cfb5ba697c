"""Who is at the other end of a connection: both ends prove that they know the group's secret.

Pure: what to send and how many bytes to read next, as generators; `tcp_meeting` moves the bytes.

    dialer   → hello: who, for whom, which channel, generation, session, a fresh nonce
    acceptor → its own nonce, HMAC over all of it as acceptor
    dialer   → HMAC over the same as dialer
    acceptor → one byte: taken

Every message has a fixed length, so a stranger can make nobody keep more than a hello. Proofs are
bound to ranks, channel, generation, session and both nonces, and differ by role, so that none can
be shown again elsewhere. Bytes after the handshake are neither encrypted nor signed: the network
between members is trusted to that extent, as with gloo and NCCL.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

from moe_worker.expert.exchange import Channel

T = TypeVar("T")
Steps = Generator[tuple[bytes, int], bytes, T]
"""Yields (bytes to send, number of bytes wanted), is sent exactly those, returns T."""

NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAGIC = b"MOEX"
_VERSION = 1
_HELLO = struct.Struct("!4sBBHHQ32s32s")
"""Magic, version, channel, dialer's rank, acceptor's rank, generation, session, nonce."""
_TAKEN = b"\x01"
_CHANNELS: tuple[Channel, ...] = ("control", "data")


class Refused(Exception):
    """The other end is no member of this meeting."""


@dataclass(frozen=True)
class Party:
    """This rank in one meeting."""

    key: bytes
    generation: int
    session: bytes
    """32 bytes that all members of this attempt share and no other attempt has; not secret."""
    rank: int
    size: int


def key_of(secret: str) -> bytes:
    """The key of the exchange: the deployment's secret itself goes into no other proof."""
    return hmac.digest(secret.encode(), b"moe-operator exchange", hashlib.sha256)


def dial(party: Party, peer: int, channel: Channel, nonce: bytes) -> Steps[None]:
    """The part of who opened the connection.

    Raises:
        Refused: `peer` does not know the secret, or is another.
    """
    hello = _HELLO.pack(
        _MAGIC, _VERSION, _CHANNELS.index(channel), party.rank, peer, party.generation,
        party.session, nonce,
    )  # fmt: skip
    answer = yield hello, NONCE_BYTES + _PROOF_BYTES
    spoken = hello + answer[:NONCE_BYTES]
    if not hmac.compare_digest(answer[NONCE_BYTES:], _proof(party, b"acceptor", spoken)):
        raise Refused("it does not know the group's secret")
    taken = yield _proof(party, b"dialer", spoken), len(_TAKEN)
    if taken != _TAKEN:
        raise Refused("it did not take the connection")


def accept(party: Party, nonce: bytes) -> Steps[tuple[int, Channel]]:
    """The part of who was called; returns who the other one is, and for which channel.

    Raises:
        Refused: a stranger, or a member of another generation or attempt.
    """
    hello = yield b"", _HELLO.size
    peer, channel = _caller(party, hello)
    spoken = hello + nonce
    proof = yield nonce + _proof(party, b"acceptor", spoken), _PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(party, b"dialer", spoken)):
        raise Refused("it does not know the group's secret")
    yield _TAKEN, 0
    return peer, channel


def _caller(party: Party, hello: bytes) -> tuple[int, Channel]:
    magic, version, channel, peer, called, generation, session, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or version != _VERSION or channel >= len(_CHANNELS):
        raise Refused("it does not speak this protocol")
    if generation != party.generation:
        raise Refused(f"it wants generation {generation}, this is {party.generation}")
    if session != party.session:
        raise Refused("it wants another attempt or plan")
    # The higher rank dials, so that each pair has one connection per channel.
    if called != party.rank or not party.rank < peer < party.size:
        raise Refused(f"rank {peer} has nothing to ask of rank {called} here")
    return peer, _CHANNELS[channel]


def _proof(party: Party, role: bytes, spoken: bytes) -> bytes:
    return hmac.digest(party.key, role + b"\0" + spoken, hashlib.sha256)
