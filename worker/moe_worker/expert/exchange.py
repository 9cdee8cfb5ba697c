"""Byte buffers between the ranks of one generation: grouped point-to-point, a deadline on each.

One contract, `Exchange`; `tcp_exchange` is the one on CPUs, `GroupExchange` goes over
torch.distributed process groups (gloo, and NCCL for the data), `LocalExchange` is a group of one.
Any failure ends the generation: nothing is tried again over the same exchange, which is closed at
once so that the news reaches the other ranks.

Neighbours: `moe_worker.membership` builds it, `dispatch` and the engine's agreement use it,
`nccl` is the part that needs GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Literal, Protocol

import torch.distributed as dist
from torch import Tensor

Channel = Literal["control", "data"]
PeerBuffers = Sequence[tuple[int, Tensor]]
_TAGS: dict[Channel, int] = {"control": 1, "data": 2}


class ExchangeFailed(RuntimeError):
    """An operation failed or ran out of time; `suspects` are the ranks it failed on."""

    def __init__(self, message: str, suspects: Sequence[int]) -> None:
        super().__init__(message)
        self.suspects = tuple(suspects)


class Transfer(Protocol):
    """Sends and receives that are under way; their buffers belong to it until `wait` returns."""

    def advance(self) -> None:
        """Move what can be moved at once, so that bytes that have come are in their buffers.

        Raises:
            ExchangeFailed: a peer has failed.
        """

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Return when all are done. Without a time-out of its own it has the exchange's.

        Raises:
            ExchangeFailed: a peer failed, or the deadline (counted from this call) passed.
        """


class Exchange(Protocol):
    """Buffers are contiguous uint8. Unless `whole_buffers`, a peer may send fewer bytes than the
    receive buffer has: what lies past them is then undefined."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def whole_buffers(self) -> bool:
        """Whether sender and receiver must give buffers of one length."""

    def transfer(
        self,
        channel: Channel,
        sends: PeerBuffers,
        receives: PeerBuffers,
    ) -> Transfer:
        """Post all (peer, buffer) pairs together, at most one of each kind per peer, and only
        when the one before on this channel is over.

        Control buffers live on the CPU, data buffers on the worker's device.

        Raises:
            ExchangeFailed: the group is broken already.
        """

    def close(self) -> None:
        """Tear down at once, so that peers waiting for this rank fail. May be called again."""


class PairwiseGroup(Protocol):
    """What is used of a torch process group (its stubs leave these methods out)."""

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[Tensor], peer: int, tag: int, /) -> dist.Work: ...


class NcclGroup(PairwiseGroup, Protocol):
    """Operations between start and end are launched as one."""

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> dist.Work: ...

    def abort(self) -> None: ...


class LocalExchange:
    """A group of one: nothing to send."""

    rank = 0
    size = 1
    whole_buffers = False

    def transfer(
        self,
        channel: Channel,
        sends: PeerBuffers,
        receives: PeerBuffers,
    ) -> Transfer:
        assert not sends, "a group of one has no peers to send to"
        assert not receives, "a group of one has no peers to receive from"
        return _Posted("data", [], 0.0)

    def close(self) -> None: ...


class GroupExchange:
    """Over a gloo group, and for data over an NCCL group where there is one.

    On CPUs control and data share the gloo group, told apart by tag. Used by one thread at a time.
    """

    def __init__(
        self,
        gloo: PairwiseGroup,
        timeout_seconds: float,
        nccl: NcclGroup | None = None,
    ) -> None:
        self.rank, self.size = gloo.rank(), gloo.size()
        self.whole_buffers = nccl is not None
        self._gloo: PairwiseGroup | None = gloo
        self._nccl = nccl
        self._timeout_seconds = timeout_seconds

    def transfer(
        self,
        channel: Channel,
        sends: PeerBuffers,
        receives: PeerBuffers,
    ) -> Transfer:
        if self._gloo is None:
            raise ExchangeFailed("the exchange is closed", ())
        if channel == "data" and self._nccl is not None:
            from moe_worker.expert import nccl

            return nccl.post(self._nccl, sends, receives, self._timeout_seconds)
        return _post(self._gloo, channel, sends, receives, self._timeout_seconds)

    def close(self) -> None:
        if self._nccl is not None:
            self._nccl.abort()
        # A gloo group closes its sockets when the last reference to it goes, and this was it.
        self._gloo = self._nccl = None


def _post(
    group: PairwiseGroup,
    channel: Channel,
    sends: PeerBuffers,
    receives: PeerBuffers,
    timeout_seconds: float,
) -> Transfer:
    works: list[tuple[int, dist.Work]] = []
    failed: dict[int, str] = {}
    # Receives first: a sender's bytes move only once its receiver is ready.
    for operation, pairs in ((group.recv, receives), (group.send, sends)):
        for peer, buffer in pairs:
            try:
                works.append((peer, operation([buffer], peer, _TAGS[channel])))
            except RuntimeError as error:
                failed.setdefault(peer, _first_line(error))
    if failed:
        raise failure(channel, failed)
    return _Posted(channel, works, timeout_seconds)


class _Posted:
    def __init__(
        self, channel: Channel, works: list[tuple[int, dist.Work]], timeout_seconds: float
    ) -> None:
        self._channel, self._works, self._timeout_seconds = channel, works, timeout_seconds

    def advance(self) -> None:
        """gloo has threads that do so."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        failed: dict[int, str] = {}
        works, self._works = self._works, []
        for peer, work in works:
            left = 0.0 if failed else deadline - time.monotonic()
            try:
                # gloo takes 0 for "no time-out".
                work.wait(timedelta(seconds=max(left, 0.001)))
            except RuntimeError as error:
                # After the first failure the rest are asked only whether their own peer failed
                # too: one time-out makes gloo close every pair, which accuses nobody.
                if not failed or "by peer" in str(error):
                    failed.setdefault(peer, _first_line(error))
        if failed:
            raise failure(self._channel, failed)


def failure(channel: Channel, failed: dict[int, str]) -> ExchangeFailed:
    """The error for operations that failed, given what each rank's failure said."""
    detail = "; ".join(f"rank {peer}: {text}" for peer, text in sorted(failed.items()))
    return ExchangeFailed(f"{channel} exchange failed: {detail}", sorted(failed))


def _first_line(error: RuntimeError) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
