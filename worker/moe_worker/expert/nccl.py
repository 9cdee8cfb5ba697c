"""Grouped send and receive on GPUs. Written for NCCL, import-tested only: no test runs it yet.

All operations of one transfer are one NCCL group, launched together; it completes or fails as a
whole, so a failure names every peer of it. Neighbour: `exchange` calls it for data.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from moe_worker.expert import exchange

_POLL_SECONDS = 50e-6


def post(
    group: exchange.NcclGroup,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    timeout_seconds: float,
) -> exchange.Transfer:
    """Post all pairs as one NCCL group. NCCL wants equal sizes on both sides: buffers are sent
    whole, so the sender's must have the receiver's length."""
    peers = sorted({peer for peer, _ in (*sends, *receives)})
    if not peers:
        return _Grouped(None, peers, timeout_seconds)
    try:
        group._start_coalescing()
        for peer, buffer in receives:
            group.recv([buffer], peer, 0)
        for peer, buffer in sends:
            group.send([buffer], peer, 0)
        work = group._end_coalescing()
    except RuntimeError as error:
        raise exchange.failure("data", dict.fromkeys(peers, str(error)[:200])) from error
    return _Grouped(work, peers, timeout_seconds)


class _Grouped:
    def __init__(self, work: dist.Work | None, peers: list[int], timeout_seconds: float) -> None:
        self._work, self._peers, self._timeout_seconds = work, peers, timeout_seconds

    def advance(self) -> None:
        """NCCL's kernels do so."""

    def wait(self, timeout_seconds: float | None = None) -> None:
        if self._work is None:
            return
        # NCCL's own wait only orders streams; the deadline needs the host to see completion.
        limit = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        deadline = time.monotonic() + limit
        try:
            while not self._work.is_completed():
                if time.monotonic() > deadline:
                    told = f"not complete after {limit:g} s"
                    raise exchange.failure("data", dict.fromkeys(self._peers, told))
                time.sleep(_POLL_SECONDS)
            self._work.wait()
        except exchange.ExchangeFailed:
            raise
        except RuntimeError as error:
            told = str(error)[:200]
            raise exchange.failure("data", dict.fromkeys(self._peers, told)) from error
