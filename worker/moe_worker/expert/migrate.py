"""Bring one epoch's experts into free slots of this rank while the table in force goes on serving.

The receiver pulls, at most the plan's bytes per second: from a slot of its own, else from the
nearest live holder over the control API, else from the next one, else from the checkpoint. Every
arrival is verified by its SHA-256 before it counts. Nothing here decides when the epoch comes into
force or is given up; the engine's agreement does.

Neighbours: `moe_placement.walk.migration.diff` derives the moves, `bank` takes the weights,
`moe_worker.control` is the peers' side.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from moe_api.names import CONTROL_EXPERT
from moe_placement.walk.migration import Move
from moe_worker.expert.bank import ExpertBank
from moe_worker.model.weights import ExpertWeights

logger = logging.getLogger(__name__)

CHECKSUM_HEADER = "x-moe-checksum"
_CHUNK_BYTES = 1 << 18
_CONNECT_SECONDS = 2.0
_READ_SECONDS = 5.0


class PullFailed(RuntimeError):
    """This holder gave no usable weights; the message says why."""


class Cancelled(Exception):
    """The epoch is not wanted any more."""


@dataclass(frozen=True)
class Source:
    """Where an expert lies now, in a plan in force."""

    address: str
    layer: int
    slot: int
    expert: int
    generation: int
    epoch: int


class Pace:
    """Keeps a stream of bytes under a rate: how long to wait after so many."""

    def __init__(self, max_bytes_per_second: float, started_seconds: float) -> None:
        self._rate, self._started_seconds = max_bytes_per_second, started_seconds
        self._bytes = 0

    def delay(self, num_bytes: int, now_seconds: float) -> float:
        """Seconds to wait now that `num_bytes` more have come."""
        self._bytes += num_bytes
        return max(0.0, self._started_seconds + self._bytes / self._rate - now_seconds)


class PeerWeights:
    """Pulls experts over the members' control API."""

    def __init__(self, token: str, control_port: int) -> None:
        self._port = control_port
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        # Members are asked by address: a proxy from the environment must not come between.
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=timeout, trust_env=False
        )

    def close(self) -> None:
        self._http.close()

    def pull(self, source: Source, num_bytes: int, pause_after: Callable[[int], None]) -> bytearray:
        """The bytes of one expert, verified; `pause_after(n)` is called after each piece.

        Raises:
            PullFailed: unreachable, not held there, wrong length or checksum.
        """
        host = f"[{source.address}]" if ":" in source.address else source.address
        url = f"http://{host}:{self._port}{CONTROL_EXPERT}/{source.layer}/{source.slot}"
        asked = {
            "expert": source.expert, "generation": source.generation, "epoch": source.epoch,
        }  # fmt: skip
        raw, digest = bytearray(), hashlib.sha256()
        try:
            with self._http.stream("GET", url, params=asked) as response:
                if response.status_code != 200:
                    raise PullFailed(f"{url} answered {response.status_code}")
                for piece in response.iter_raw(_CHUNK_BYTES):
                    raw += piece
                    digest.update(piece)
                    if len(raw) > num_bytes:
                        raise PullFailed(f"{url} sends more than {num_bytes} bytes")
                    pause_after(len(piece))
                promised = response.headers.get(CHECKSUM_HEADER, "")
        except httpx.HTTPError as error:
            raise PullFailed(f"{url}: {type(error).__name__}: {error}") from error
        if len(raw) != num_bytes or digest.hexdigest() != promised:
            raise PullFailed(
                f"{url}: {len(raw)} of {num_bytes} bytes with checksum {digest.hexdigest()}, "
                f"promised {promised or 'none'}"
            )
        return raw


class Staging:
    """One epoch's arrivals on one rank; `run` in a thread, the counters readable from others."""

    def __init__(
        self,
        moves: Sequence[Move],
        own_rank: int,
        addresses: Sequence[str],
        in_force: tuple[int, int],
        bank: ExpertBank,
        read_checkpoint: Callable[[int, int], ExpertWeights],
        peers: PeerWeights,
        max_bytes_per_second: float,
        wait: Callable[[float], bool],
        on_bytes: Callable[[int], None],
    ) -> None:
        """
        Args:
            moves: those whose target is this rank.
            in_force: (generation, epoch) that the sources hold.
            read_checkpoint: (MoE layer ordinal, expert) → weights.
            wait: sleeps so many seconds; True as soon as this epoch is not wanted any more.
            on_bytes: told of every verified arrival.
        """
        self._moves, self._own_rank, self._addresses = moves, own_rank, addresses
        self._in_force, self._bank, self._peers = in_force, bank, peers
        self._read_checkpoint, self._wait, self._on_bytes = read_checkpoint, wait, on_bytes
        self._max_bytes_per_second = max_bytes_per_second
        self.moves_done = 0
        self.num_bytes = 0
        self.complete = False

    @property
    def moves_total(self) -> int:
        return len(self._moves)

    def run(self) -> None:
        """Returns when everything has arrived.

        Raises:
            Cancelled: by `wait`.
            ModelUnreadable, OSError: no holder has it and the checkpoint cannot be read.
        """
        pace = Pace(self._max_bytes_per_second, time.monotonic())
        for move in self._moves:
            weights = self._obtain(move, pace)
            if not self._bank.write(move.layer, move.slot, weights, self._wanted):
                raise Cancelled
            self.moves_done += 1
            self.num_bytes += self._bank.bytes_per_expert
            self._on_bytes(self._bank.bytes_per_expert)
        self.complete = True

    def _obtain(self, move: Move, pace: Pace) -> ExpertWeights:
        for rank, slot in move.sources:
            if rank == self._own_rank:
                return self._bank.weights_at(move.layer, slot)
            source = Source(self._addresses[rank], move.layer, slot, move.expert, *self._in_force)
            try:
                raw = self._peers.pull(
                    source, self._bank.bytes_per_expert, lambda n: self._pause(pace, n)
                )
            except PullFailed as error:
                logger.warning("expert %d of layer %d: %s", move.expert, move.layer, error)
                continue
            return self._bank.from_bytes(raw)
        weights = self._read_checkpoint(move.layer, move.expert)
        self._pause(pace, self._bank.bytes_per_expert)
        return weights

    def _pause(self, pace: Pace, num_bytes: int) -> None:
        if self._wait(pace.delay(num_bytes, time.monotonic())):
            raise Cancelled

    def _wanted(self) -> bool:
        return not self._wait(0.0)
