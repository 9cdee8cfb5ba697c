"""Tokens per expert held here, from counters that are per slot: for a metric, not for decisions.

A slot's counter goes on when a rebalance puts another expert into it, so its growth is credited to
an expert only while that expert stays. What a slot received between two readings with a change in
between is credited to nobody: the metric may lag behind at a switch, but never lies.
"""

from __future__ import annotations

import heapq
import threading

FREE = -1


class ExpertTokens:
    """Accumulates; readings may come from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens: dict[tuple[int, int], int] = {}
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        """(layer, slot) → (expert, counter) of the last reading."""

    def read(self, served_LS: list[list[int]], held_LS: list[list[int]]) -> None:
        """Take one reading of the slots' counters and of the experts they held at that moment."""
        with self._lock:
            for layer, (served, held) in enumerate(zip(served_LS, held_LS, strict=False)):
                for slot, (count, expert) in enumerate(zip(served, held, strict=False)):
                    self._credit(layer, slot, expert, count)

    def busiest(self, limit: int) -> list[tuple[tuple[int, int], int]]:
        """((layer, expert), tokens) of experts held here, most tokens first; ties by id."""
        with self._lock:
            held = {(layer, e) for (layer, _), (e, _) in self._slots.items() if e != FREE}
            tokens = [(key, self._tokens.get(key, 0)) for key in held]
            return heapq.nsmallest(limit, tokens, key=lambda pair: (-pair[1], pair[0]))

    def _credit(self, layer: int, slot: int, expert: int, count: int) -> None:
        last_expert, last_count = self._slots.get((layer, slot), (expert, 0))
        if expert == last_expert != FREE:
            key = (layer, expert)
            self._tokens[key] = self._tokens.get(key, 0) + count - last_count
        self._slots[layer, slot] = (expert, count)
