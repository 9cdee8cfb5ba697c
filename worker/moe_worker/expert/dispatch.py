"""Token rows to the ranks that hold their experts, and every expert's row back.

A rank sends a token's row once to each rank that holds some of its experts, with a header that
names the slots; the receiver expands it. Rows come back unsummed and the source adds them, times
their routing weights, in top-k order in float32: the result does not depend on where experts live.

A batch goes in rounds of at most `tokens_per_round` tokens of each rank, which bounds every
buffer; all ranks know from the step's agreement how many tokens each rank has, so nobody waits
for a message that never comes, and a rank without tokens only serves the others.

Neighbours: `routing_table` gives the physical ids, `moe_kernels.dispatch` packs, unpacks and adds
up, `exchange` moves the bytes, `layer` runs the experts on each piece.

Letters: T tokens of this rank, t tokens of one rank in one round, P (row, choice) pairs, K choices,
H hidden, R ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels.bins import BinLayout, Bins, Unpacked
from moe_kernels.dispatch import add_up, pack, unpack
from moe_worker.engine.observer import ExchangePhase, Observer, Scope, Unobserved
from moe_worker.expert.exchange import Exchange, Transfer

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class DispatchShape:
    hidden: int
    top_k: int
    slots_per_rank: int
    wire_dtype: torch.dtype
    """The experts' weight dtype: their products round the rows to it in any case, so sending them
    rounded changes no number."""
    tokens_per_round: int = 512
    overlap_tokens: int = 64
    """Rounds with more tokens than this compute the local rows while the others travel; smaller
    ones are one piece, so that every expert's weights are read once."""

    @property
    def layout(self) -> BinLayout:
        return BinLayout(self.hidden, self.top_k, self.wire_dtype)

    @property
    def row_bytes(self) -> int:
        return self.layout.row_bytes

    @property
    def num_returns(self) -> int:
        """All rows that can come back in one round."""
        return self.tokens_per_round * self.top_k


def buffer_bytes(shape: DispatchShape, num_ranks: int) -> int:
    """What a `Dispatcher` allocates in a group of this size."""
    if num_ranks == 1:
        return 0
    bins = _num_bins(num_ranks) * shape.layout.bin_bytes(shape.tokens_per_round)
    return bins + shape.num_returns * shape.hidden * _FLOAT_BYTES


def _num_bins(num_ranks: int) -> int:
    """For what every rank sends us, ourselves among them, and for what we send the others. A rank
    that is alone dispatches nothing."""
    return 2 * num_ranks - 1 if num_ranks > 1 else 0


class Dispatcher:
    """Buffers for one generation; `begin` starts a layer's batch. One batch at a time."""

    def __init__(
        self,
        exchange: Exchange,
        shape: DispatchShape,
        device: str | torch.device = "cpu",
        observer: Observer | None = None,
        scopes: Sequence[Scope] | None = None,
    ) -> None:
        self.exchange, self.shape, self.layout = exchange, shape, shape.layout
        self.row_bytes = shape.row_bytes
        device, size = torch.device(device), exchange.size
        self.observer: Observer = observer or Unobserved()
        self.scopes: Sequence[Scope] = scopes or ["remote"] * size
        self.peers = [(exchange.rank + i) % size for i in range(1, size)]
        # Bin r is what rank r sends us; our own rows are packed there at once.
        self.bins = Bins.allocate(_num_bins(size), shape.tokens_per_round, self.layout, device)
        own = exchange.rank
        self.bin_R = [r if r == own else size + r - (r > own) for r in range(size)]
        self._bin_bytes = self.bins.memory.unbind()
        # A pair's row comes back from exactly one rank, so one buffer holds all of them.
        num_returns = shape.num_returns if self.peers else 0
        self.back_NH = torch.empty((num_returns, shape.hidden), device=device)
        self._back_bytes = self.back_NH.view(-1).view(torch.uint8)

    def num_rounds(self, tokens_R: Sequence[int]) -> int:
        return -(-max(tokens_R) // self.shape.tokens_per_round)

    def begin(
        self, x_TH: Tensor, physical_TK: Tensor, weights_TK: Tensor, tokens_R: Sequence[int]
    ) -> RoutedBatch:
        """A layer's batch.

        Args:
            x_TH: float32.
            physical_TK: int64, physical expert of each choice, −1 = none (contributes exactly 0).
            weights_TK: float32.
            tokens_R: tokens of every rank in this step, from the agreement.

        Raises:
            ValueError: the shapes do not fit the model or the agreed number of tokens.
        """
        self.check(x_TH, physical_TK, tokens_R)
        return RoutedBatch(self, x_TH, physical_TK, weights_TK, tokens_R)

    def check(self, x_TH: Tensor, choices_TK: Tensor, tokens_R: Sequence[int]) -> None:
        """Raise ValueError unless the shapes fit the model and the agreed number of tokens."""
        expected = (tokens_R[self.exchange.rank], self.shape.top_k)
        if tuple(choices_TK.shape) != expected or x_TH.shape != (expected[0], self.shape.hidden):
            raise ValueError(
                f"choices {list(choices_TK.shape)} and rows {list(x_TH.shape)} do not fit "
                f"{expected[0]} agreed tokens, {expected[1]} choices, hidden {self.shape.hidden}"
            )

    def check_tokens(self, num_tokens: int, tokens_R: Sequence[int]) -> None:
        """Raise ValueError unless so many tokens of this rank were agreed."""
        if num_tokens != tokens_R[self.exchange.rank]:
            raise ValueError(
                f"{num_tokens} tokens do not fit {tokens_R[self.exchange.rank]} agreed tokens"
            )

    def outbox(self, peer: int, num_tokens: int, num_rows: int) -> Tensor:
        """The bytes to send."""
        if self.exchange.whole_buffers:
            num_rows = num_tokens
        return self._bin_bytes[self.bin_R[peer]][: self.layout.used_bytes(num_tokens, num_rows)]

    def inbox(self, peer: int, num_tokens: int) -> Tensor:
        return self._bin_bytes[peer][: self.layout.used_bytes(num_tokens, num_tokens)]

    def returns(self, first: int, end: int) -> Tensor:
        """The bytes of rows first:end of `back_NH`."""
        row_bytes = self.shape.hidden * _FLOAT_BYTES
        return self._back_bytes[first * row_bytes : end * row_bytes]

    def one_piece(self, tokens_R: Sequence[int]) -> bool:
        """Whether a step of so many tokens of several ranks goes in one round, and a rank's rows at
        once."""
        if self.exchange.size == 1 or max(tokens_R) > self.shape.tokens_per_round:
            return False
        return sum(tokens_R) <= self.shape.overlap_tokens

    def send_rows(self, tokens_R: Sequence[int], rows_R: Sequence[int]) -> Transfer:
        """What was packed for the others, and room for what they pack for us."""
        own_tokens = tokens_R[self.exchange.rank]
        peers = self.peers if own_tokens else []
        sends = [(peer, self.outbox(peer, own_tokens, rows_R[peer])) for peer in peers]
        for peer, buffer in sends:
            self.observer.sent(self.scopes[peer], buffer.numel())
        receives = [(p, self.inbox(p, tokens_R[p])) for p in self.peers if tokens_R[p]]
        return self.exchange.transfer("data", sends, receives)

    def return_rows(
        self, returning: Sequence[tuple[int, Tensor]], pairs_R: Sequence[int]
    ) -> list[int]:
        """Send the others their rows (float32, contiguous) and await ours; where each rank's begin
        in `back_NH`."""
        first, first_R = 0, [0] * self.exchange.size
        receives: list[tuple[int, Tensor]] = []
        for peer in self.peers:
            if pairs_R[peer]:
                first_R[peer], first = first, first + pairs_R[peer]
                receives.append((peer, self.returns(first_R[peer], first)))
        sends = [(peer, rows.view(-1).view(torch.uint8)) for peer, rows in returning]
        for peer, buffer in sends:
            self.observer.sent(self.scopes[peer], buffer.numel())
        self.wait("combine", self.exchange.transfer("data", sends, receives))
        return first_R

    def wait(self, phase: ExchangePhase, transfer: Transfer) -> None:
        started = time.perf_counter()
        transfer.wait()
        self.observer.exchange(phase, time.perf_counter() - started)


class RoutedBatch:
    """One layer's tokens under way. For each piece of `pieces`, `combine` must be called before
    the next is asked for; then `finish`."""

    def __init__(
        self,
        owner: Dispatcher,
        x_TH: Tensor,
        physical_TK: Tensor,
        weights_TK: Tensor,
        tokens_R: Sequence[int],
    ) -> None:
        self._owner, self._tokens_R = owner, tokens_R
        self._x_TH, self._physical_TK, self._weights_TK = x_TH, physical_TK, weights_TK
        self._out_TH = torch.empty_like(x_TH)

    def pieces(self) -> Iterator[Unpacked]:
        """Rows to run through the experts of this rank."""
        for number in range(self._owner.num_rounds(self._tokens_R)):
            yield from self._round(number)

    def combine(self, piece: Unpacked, y_PH: Tensor) -> None:
        """Take the experts' float32 rows of a piece, in its order."""
        start = 0
        for rank, count in zip(self._sources, piece.pairs_Q, strict=True):
            row_p, start = piece.row_P[start : start + count], start + count
            if rank == self._owner.exchange.rank:
                self._own = y_PH, row_p
            elif count:
                self._returning.append((rank, y_PH.index_select(0, row_p)))

    def finish(self) -> Tensor:
        """Weighted sums, float32 [T, H]."""
        return self._out_TH

    def _round(self, number: int) -> Iterator[Unpacked]:
        owner, own = self._owner, self._owner.exchange.rank
        size = owner.shape.tokens_per_round
        tokens_R = [min(max(t - number * size, 0), size) for t in self._tokens_R]
        x_tH, physical_tK, weights_tK, out_tH = (
            each[number * size : number * size + tokens_R[own]]
            for each in (self._x_TH, self._physical_TK, self._weights_TK, self._out_TH)
        )
        rows_R, pairs_R = pack(
            owner.bins, x_tH, physical_tK, owner.shape.slots_per_rank, owner.bin_R
        )
        owner.observer.sent("self", rows_R[own] * owner.layout.row_bytes)
        # Without choices here our own part is empty: no row of a piece, none to add.
        self._own = owner.back_NH[:0], physical_tK.new_empty(0)
        self._returning: list[tuple[int, Tensor]] = []
        sending = owner.send_rows(tokens_R, rows_R)
        if sum(tokens_R) > owner.shape.overlap_tokens:
            yield self._unpacked([own], tokens_R)
            owner.wait("dispatch", sending)
            yield self._unpacked(owner.peers, tokens_R)
        else:
            owner.wait("dispatch", sending)
            yield self._unpacked([own, *owner.peers], tokens_R)
        first_R = owner.return_rows(self._returning, pairs_R)
        add_up(
            out_tH, physical_tK, weights_tK, owner.shape.slots_per_rank,
            own, *self._own, owner.back_NH, first_R,
        )  # fmt: skip

    def _unpacked(self, ranks: Sequence[int], tokens_R: Sequence[int]) -> Unpacked:
        self._sources = [rank for rank in ranks if tokens_R[rank]]
        sources = [(rank, tokens_R[rank]) for rank in self._sources]
        return unpack(self._owner.bins, sources, self._owner.shape.slots_per_rank)
