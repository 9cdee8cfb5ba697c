"""A byte 3-gram model: the yardstick that the trained model must beat on held-out text.

Interpolated Witten-Bell smoothing: each order leaves room for new bytes in proportion to how many
different bytes followed its context, and fills that room by the next lower order (Chen & Goodman,
1998, section 2.4). The lowest order counts every byte once more than seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

BYTES = 256


class ByteTrigram:
    """p(byte | the two bytes before), counted from documents."""

    def __init__(self, documents: Iterable[str]) -> None:
        self.counts = [torch.zeros(BYTES**order, dtype=torch.int32) for order in (1, 2, 3)]
        for document in documents:
            data = _bytes(document)
            for order in (1, 2, 3):
                where, times = _grams(data, order).unique(return_counts=True)
                self.counts[order - 1][where] += times.int()

    def bits_per_byte(self, text: str) -> float:
        """Mean −log₂ p over the bytes of a text, from its third byte on."""
        grams = _grams(_bytes(text), 3)
        return float(-self.probabilities(grams).log().mean() / math.log(2))

    def probabilities(self, grams: torch.Tensor) -> torch.Tensor:
        """p(last byte | first two) of 3-grams given as first·256² + second·256 + last."""
        counts_1 = self.counts[0].double()
        probability = (counts_1[grams % BYTES] + 1) / (counts_1.sum() + BYTES)
        for order in (2, 3):
            table = self.counts[order - 1].view(-1, BYTES)
            context, last = grams % BYTES**order // BYTES, grams % BYTES
            used, where = context.unique(return_inverse=True)
            seen = table[used].sum(1).double()[where]
            followers = (table[used] > 0).sum(1).double()[where]
            known = seen > 0
            mixed = (table[context, last].double() + followers * probability) / (
                seen + followers
            ).clamp_min(1)
            probability = torch.where(known, mixed, probability)
        return probability


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def _grams(data: torch.Tensor, order: int) -> torch.Tensor:
    length = len(data) - order + 1
    if length <= 0:
        return torch.empty(0, dtype=torch.long)
    gram = torch.zeros(length, dtype=torch.long)
    for i in range(order):
        gram = gram * BYTES + data[i : i + length]
    return gram
