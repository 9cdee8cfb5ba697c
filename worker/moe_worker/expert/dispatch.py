"""Token rows to the ranks that hold their experts, and every expert's row back.

A rank sends a token's row once to each rank that holds some of its experts, with a header that
names the slots; the receiver expands it. Rows come back unsummed and the source adds them, times
their routing weights, in top-k order in float32: the result does not depend on where experts live.

A batch goes in rounds of at most `tokens_per_round` tokens of each rank, which bounds every
buffer; all ranks know from the step's agreement how many tokens each rank has, so nobody waits
for a message that never comes, and a rank without tokens only serves the others.

Neighbours: `routing_table` gives the physical ids, `exchange` moves the bytes, `layer` runs the
experts on each slice.

Letters: T tokens of this rank, t tokens of one rank in one round, N rows of a slice, P (row,
choice) pairs, K choices, H hidden, R ranks, S slots a rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_worker.engine.observer import ExchangePhase, Observer, Scope, Unobserved
from moe_worker.expert.exchange import Exchange, Transfer

_HEADER_DTYPE = torch.int32
_ALIGNMENT_BYTES = 16


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
    ones are one slice, for the sake of fuller tiles."""

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.wire_dtype.itemsize

    @property
    def return_bytes(self) -> int:
        """All float32 rows that can come back in one round."""
        return self.tokens_per_round * self.top_k * self.hidden * 4

    def header_bytes(self, num_tokens: int) -> int:
        raw = num_tokens * self.top_k * _HEADER_DTYPE.itemsize
        return -(-raw // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def bin_bytes(self, num_tokens: int) -> int:
        """Header and rows of one rank's tokens when all of them go to one destination."""
        return self.header_bytes(num_tokens) + num_tokens * self.row_bytes


def buffer_bytes(shape: DispatchShape, num_ranks: int) -> int:
    """What a `Dispatcher` allocates in a group of this size."""
    if num_ranks == 1:
        return 0
    return 2 * (num_ranks - 1) * shape.bin_bytes(shape.tokens_per_round) + shape.return_bytes


@dataclass(frozen=True)
class Slice:
    """Rows to run through the experts of this rank."""

    rows_NH: Tensor
    """float32"""
    slots_NK: Tensor
    """int64 local slots, −1 = this choice is not here; the pairs ≥ 0 in row-major order are the
    rows that `combine` wants."""
    pairs_of_rank: tuple[tuple[int, int], ...]
    """(source rank, number of pairs) in the order of the rows."""


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
        self.exchange, self.shape = exchange, shape
        self.device = torch.device(device)
        self.observer: Observer = observer or Unobserved()
        self.scopes: Sequence[Scope] = scopes or ["remote"] * exchange.size
        self.peers = [(exchange.rank + i) % exchange.size for i in range(1, exchange.size)]
        bin_bytes = shape.bin_bytes(shape.tokens_per_round)
        self._out = {p: self._bytes(bin_bytes) for p in self.peers}
        self._in = {p: self._bytes(bin_bytes) for p in self.peers}
        # A pair's row comes back from exactly one rank, so one buffer holds all of them.
        self._back = self._bytes(shape.return_bytes if self.peers else 0)

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

    def pack(self, peer: int, slots_tK: Tensor, rows_NH: Tensor) -> Tensor:
        """Header and the rows that `peer` serves, into its bin; returns the bytes to send."""
        num_tokens = slots_tK.shape[0]
        header, count = self.shape.header_bytes(num_tokens), slots_tK.numel()
        buffer, end = self._out[peer], header + rows_NH.numel() * rows_NH.itemsize
        buffer[: count * _HEADER_DTYPE.itemsize].view(_HEADER_DTYPE).copy_(slots_tK.view(-1))
        buffer[header:end].view(self.shape.wire_dtype).copy_(rows_NH.view(-1))
        whole = self.shape.bin_bytes(num_tokens) if self.exchange.whole_buffers else end
        return buffer[:whole]

    def unpack(self, peer: int, num_tokens: int) -> tuple[Tensor, Tensor]:
        """(rows [N, H] float32, slots [N, K] int64) that `peer` sent for its `num_tokens`."""
        buffer, header = self._in[peer], self.shape.header_bytes(num_tokens)
        told_bytes = num_tokens * self.shape.top_k * _HEADER_DTYPE.itemsize
        told = buffer[:told_bytes].view(_HEADER_DTYPE).view(num_tokens, self.shape.top_k)
        slots_tK = told.to(torch.int64)
        slots_NK = slots_tK[(slots_tK >= 0).any(dim=1)]
        raw = buffer[header : header + slots_NK.shape[0] * self.shape.row_bytes]
        rows_NH = raw.view(self.shape.wire_dtype).view(-1, self.shape.hidden)
        return rows_NH.to(torch.float32), slots_NK

    def inbox(self, peer: int, num_tokens: int) -> Tensor:
        return self._in[peer][: self.shape.bin_bytes(num_tokens)]

    def returns(self, first_pair: int, num_pairs: int) -> Tensor:
        row = self.shape.hidden * 4
        return self._back[first_pair * row : (first_pair + num_pairs) * row]

    def _bytes(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.uint8, device=self.device)


@dataclass(frozen=True)
class _Part:
    """One rank's share of a round."""

    slots_tK: Tensor
    """Its slots, −1 = the choice is elsewhere or nowhere."""
    here_t: Tensor
    """Which tokens it has a choice of."""
    pairs_P: Tensor
    """Flat (token, choice) numbers, ascending."""


class RoutedBatch:
    """One layer's tokens under way. For each slice of `slices`, `combine` must be called before
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
        self._x_TH = x_TH.to(owner.shape.wire_dtype)
        slots = owner.shape.slots_per_rank
        # Rounded down, so that "none" is on rank −1.
        self._rank_TK = torch.div(physical_TK, slots, rounding_mode="floor")
        self._slot_TK = physical_TK % slots
        self._weights_TK = weights_TK
        self._out_TH = x_TH.new_zeros(x_TH.shape, dtype=torch.float32)
        self._y_PH = self._out_TH
        self._parts: dict[int, _Part] = {}
        self._returning: list[tuple[int, Tensor]] = []

    def slices(self) -> Iterator[Slice]:
        for number in range(self._owner.num_rounds(self._tokens_R)):
            yield from self._round(number)

    def combine(self, piece: Slice, y_PH: Tensor) -> None:
        """Take the experts' float32 rows of a slice, in the order of its pairs."""
        own, start = self._owner.exchange.rank, 0
        for rank, count in piece.pairs_of_rank:
            y_pH, start = y_PH[start : start + count], start + count
            if rank == own:
                self._y_PH[self._part(own).pairs_P] = y_pH
            elif count:
                self._returning.append((rank, y_pH.view(-1).view(torch.uint8)))

    def finish(self) -> Tensor:
        """Weighted sums, float32 [T, H]."""
        return self._out_TH

    def _round(self, number: int) -> Iterator[Slice]:
        owner = self._owner
        size = owner.shape.tokens_per_round
        tokens_R = [min(max(t - number * size, 0), size) for t in self._tokens_R]
        own_tokens = tokens_R[owner.exchange.rank]
        self._span = slice(number * size, number * size + own_tokens)
        self._rank_tK, self._slot_tK = self._rank_TK[self._span], self._slot_TK[self._span]
        self._x_tH = self._x_TH[self._span]
        self._parts = {}
        self._y_PH = self._out_TH.new_zeros((own_tokens * owner.shape.top_k, owner.shape.hidden))
        self._returning = []
        sending = self._send_rows(tokens_R)
        if sum(tokens_R) > owner.shape.overlap_tokens:
            yield self._join([self._local()])
            self._wait("dispatch", sending)
            yield self._join(self._arrived(tokens_R))
        else:
            self._wait("dispatch", sending)
            yield self._join([self._local(), *self._arrived(tokens_R)])
        self._collect_returns()
        self._add_up()

    def _send_rows(self, tokens_R: Sequence[int]) -> Transfer:
        owner = self._owner
        sends = []
        for peer in owner.peers if tokens_R[owner.exchange.rank] else []:
            part = self._part(peer)
            sends.append((peer, owner.pack(peer, part.slots_tK, self._x_tH[part.here_t])))
            owner.observer.sent(owner.scopes[peer], sends[-1][1].numel())
        receives = [(p, owner.inbox(p, tokens_R[p])) for p in owner.peers if tokens_R[p]]
        return owner.exchange.transfer("data", sends, receives)

    def _local(self) -> tuple[int, Tensor, Tensor]:
        own = self._owner.exchange.rank
        part = self._part(own)
        rows_NH = self._x_tH[part.here_t].to(torch.float32)
        self._owner.observer.sent("self", rows_NH.shape[0] * self._owner.shape.row_bytes)
        return own, rows_NH, part.slots_tK[part.here_t]

    def _arrived(self, tokens_R: Sequence[int]) -> list[tuple[int, Tensor, Tensor]]:
        return [(p, *self._owner.unpack(p, tokens_R[p])) for p in self._owner.peers if tokens_R[p]]

    def _join(self, parts: Sequence[tuple[int, Tensor, Tensor]]) -> Slice:
        if not parts:
            rows_0H = self._x_tH.new_empty((0, self._owner.shape.hidden), dtype=torch.float32)
            return Slice(rows_0H, self._slot_tK.new_empty((0, self._owner.shape.top_k)), ())
        return Slice(
            torch.cat([rows for _, rows, _ in parts]),
            torch.cat([slots for _, _, slots in parts]),
            tuple((rank, int((slots >= 0).sum())) for rank, _, slots in parts),
        )

    def _collect_returns(self) -> None:
        owner, first = self._owner, 0
        places: list[tuple[Tensor, Tensor]] = []
        receives: list[tuple[int, Tensor]] = []
        for peer in owner.peers:
            pairs_P = self._part(peer).pairs_P
            num_pairs = pairs_P.shape[0]
            if num_pairs:
                buffer = owner.returns(first, num_pairs)
                first += num_pairs
                receives.append((peer, buffer))
                places.append((pairs_P, buffer))
        for peer, buffer in self._returning:
            owner.observer.sent(owner.scopes[peer], buffer.numel())
        self._wait("combine", owner.exchange.transfer("data", self._returning, receives))
        for pairs_P, buffer in places:
            self._y_PH[pairs_P] = buffer.view(torch.float32).view(-1, owner.shape.hidden)

    def _add_up(self) -> None:
        """Top-k order, one multiplication and one addition each: the same for every placement."""
        out_tH, weights_tK = self._out_TH[self._span], self._weights_TK[self._span]
        y_tKH = self._y_PH.view(-1, self._owner.shape.top_k, self._owner.shape.hidden)
        y_tKH.mul_(weights_tK[:, :, None])
        for y_tH in y_tKH.unbind(1):
            out_tH += y_tH

    def _part(self, rank: int) -> _Part:
        """What `rank` serves of this round's tokens."""
        part = self._parts.get(rank)
        if part is None:
            at_tK = self._rank_tK == rank
            slots_tK = torch.where(at_tK, self._slot_tK, -1)
            pairs_P = at_tK.view(-1).nonzero().view(-1)
            part = self._parts[rank] = _Part(slots_tK, at_tK.any(dim=1), pairs_P)
        return part

    def _wait(self, phase: ExchangePhase, transfer: Transfer) -> None:
        started = time.perf_counter()
        transfer.wait()
        self._owner.observer.exchange(phase, time.perf_counter() - started)
