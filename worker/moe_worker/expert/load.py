"""Tokens counted per expert and per slot: the worker's side of `LoadReport`.

What a step counts is a draft, which is added when the step is committed and thrown away when it
failed and is run again; warm-up and padding never come here. Read by the control API from another
thread.

Letters: L MoE layers, E logical experts, S slots of this rank.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

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
        self.routed_LE = np.zeros((num_layers, num_experts), np.int64)
        """What own tokens chose in steps that are committed. Always the same memory, written by
        the engine's thread."""
        self._lock = threading.Lock()
        self._served_LS = np.zeros((num_layers, num_slots), np.int64)
        self._invalid = 0
        self._draft: list[_Draft] = []

    # What is given is added later and must not be written to.

    def count_routed(self, layer: int, tokens_E: IntArray, num_invalid: int) -> None:
        self._draft.append(_Draft(layer, tokens_E, None, num_invalid))

    def count_served(self, layer: int, tokens_S: IntArray) -> None:
        self._draft.append(_Draft(layer, None, tokens_S, 0))

    def count_run(self, first_layer: int, counts: Counts) -> None:
        """Of neighbouring layers at once."""
        layers = slice(first_layer, first_layer + len(counts.chosen_LE))
        self._draft.append(_Draft(layers, *counts))

    def commit(self) -> None:
        with self._lock:
            for layers, routed, served, num_invalid in self._draft:
                if routed is not None:
                    _add(self.routed_LE[layers], routed)
                if served is not None:
                    _add(self._served_LS[layers, ..., : served.shape[-1]], served)
                self._invalid += num_invalid
        self._draft.clear()

    def discard(self) -> None:
        """Forget the step under way."""
        self._draft.clear()

    def resize(self, num_slots: int) -> None:
        """Another number of slots a rank; counts of slots that remain go on."""
        resized = np.zeros((len(self._served_LS), num_slots), np.int64)
        kept = min(num_slots, self._served_LS.shape[1])
        with self._lock:
            resized[:, :kept] = self._served_LS[:, :kept]
            self._served_LS = resized
        self._draft.clear()

    def snapshot(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(self.routed_LE.tolist(), self._served_LS.tolist(), self._invalid)


class _Draft(NamedTuple):
    """What a step under way has counted in some layers."""

    layers: int | slice
    routed: IntArray | None
    served: IntArray | None
    num_invalid: int


def _add(total: IntArray, numbers: IntArray) -> None:
    """In place: `total[...] += numbers` would copy it onto itself besides."""
    np.add(total, numbers, out=total)
