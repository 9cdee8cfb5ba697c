"""Tokens counted per expert and per slot: the worker's side of `LoadReport`.

A step counts into a draft that is added when the step is committed and thrown away when it failed
and is run again; warm-up and padding never come here. Read by the control API from another thread.

Letters: L MoE layers, E logical experts, S slots of this rank.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np

from moe_kernels.stack import Counts, IntArray


@dataclass(frozen=True)
class LoadCounts:
    """Cumulative since the process began."""

    routed_LE: list[list[int]]
    """What this rank's own tokens chose."""
    served_LS: list[list[int]]
    """What each slot here received, from all ranks."""
    invalid_expert_ids: int


class LoadCounters:
    def __init__(self, num_layers: int, num_experts: int, num_slots: int) -> None:
        self.num_experts = num_experts
        self._lock = threading.Lock()
        self._routed_LE = np.zeros((num_layers, num_experts), np.int64)
        self._served_LS = np.zeros((num_layers, num_slots), np.int64)
        self._invalid = 0
        self.draft_routed_LE = np.zeros_like(self._routed_LE)
        """What the step under way has counted so far."""
        self._draft_served_LS = np.zeros_like(self._served_LS)
        self._draft_invalid = 0

    def count_routed(self, layer: int, tokens_E: IntArray, num_invalid: int) -> None:
        self.draft_routed_LE[layer] += tokens_E
        self._draft_invalid += num_invalid

    def count_served(self, layer: int, tokens_S: IntArray) -> None:
        self._draft_served_LS[layer, : len(tokens_S)] += tokens_S

    def count_run(self, first_layer: int, counts: Counts) -> None:
        """Of neighbouring layers at once."""
        routed_LE, served_LS, num_invalid = counts
        layers = slice(first_layer, first_layer + len(routed_LE))
        self.draft_routed_LE[layers] += routed_LE
        self._draft_served_LS[layers, : served_LS.shape[1]] += served_LS
        self._draft_invalid += num_invalid

    def commit(self) -> None:
        with self._lock:
            self._routed_LE += self.draft_routed_LE
            self._served_LS += self._draft_served_LS
            self._invalid += self._draft_invalid
        self.discard()

    def discard(self) -> None:
        """Forget the step under way."""
        self.draft_routed_LE.fill(0)
        self._draft_served_LS.fill(0)
        self._draft_invalid = 0

    def resize(self, num_slots: int) -> None:
        """Another number of slots a rank; counts of slots that remain go on."""
        resized = np.zeros((len(self._served_LS), num_slots), np.int64)
        kept = min(num_slots, self._served_LS.shape[1])
        with self._lock:
            resized[:, :kept] = self._served_LS[:, :kept]
            self._served_LS = resized
        self._draft_served_LS = np.zeros_like(resized)
        self.discard()

    def snapshot(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(self._routed_LE.tolist(), self._served_LS.tolist(), self._invalid)
