"""Ballots between the ranks of a generation, over the exchange's control channel.

Receives for the next vote are posted ahead, so a rank with nothing to do can look, without
blocking, whether somebody has begun the next step. It is the group's liveness probe too: a member
that does not vote in time has failed.

Neighbours: `agreement` is what the ballots mean, `expert.exchange` moves them.
"""

from __future__ import annotations

import torch

from moe_worker.engine.agreement import NUM_FIELDS, Ballot
from moe_worker.expert.exchange import Exchange, Transfer

_PRESENT = 1
"""First number of every ballot on the wire; receive buffers begin with 0."""


class Council:
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
        self._mine = torch.zeros(1 + NUM_FIELDS, dtype=torch.int64)
        self._theirs = {peer: torch.zeros_like(self._mine) for peer in self._peers}
        self._listening: Transfer | None = None

    def listen(self) -> None:
        """Be ready for the next ballots. Raises ExchangeFailed."""
        if self._listening is None:
            for ballot in self._theirs.values():
                ballot[0] = 0
            receives = [(p, b.view(torch.uint8)) for p, b in self._theirs.items()]
            self._listening = self._exchange.transfer("control", [], receives)

    def heard(self) -> bool:
        """Whether a ballot has begun to arrive; only a hint, `vote` takes it.

        Raises:
            ExchangeFailed: somebody is gone.
        """
        if self._listening is not None:
            self._listening.advance()
        return any(bool(ballot[0]) for ballot in self._theirs.values())

    def vote(self, ballot: Ballot, timeout_seconds: float | None = None) -> list[Ballot]:
        """Give the own ballot, wait for all others; in rank order.

        Raises:
            ExchangeFailed: somebody did not vote in time, or is gone.
        """
        if not self._peers:
            return [ballot]
        self.listen()
        assert self._listening is not None, "listen posts the receives"
        listening, self._listening = self._listening, None
        self._mine[0] = _PRESENT
        self._mine[1:] = torch.tensor(ballot)
        mine = self._mine.view(torch.uint8)
        sending = self._exchange.transfer("control", [(p, mine) for p in self._peers], [])
        listening.wait(timeout_seconds)
        sending.wait(timeout_seconds)
        votes = dict(self._theirs)
        votes[self._exchange.rank] = self._mine
        return [Ballot(*votes[r][1:].tolist()) for r in range(self._exchange.size)]

    def close(self) -> None:
        """Forget the posted receives, which would keep the group's sockets open, and tear down."""
        self._listening = None
        self._exchange.close()
