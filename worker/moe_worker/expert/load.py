"""Tokens counted per expert and per slot: the worker's side of `LoadReport`.

A step counts into a draft that is added when the step is committed and thrown away when it failed
and is run again; warm-up and padding never come here. Read by the control API from another thread.

Letters: L MoE layers, E logical experts, S slots of this rank.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor


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
        self._routed_LE = torch.zeros((num_layers, num_experts), dtype=torch.int64)
        self._served_LS = torch.zeros((num_layers, num_slots), dtype=torch.int64)
        self._invalid = 0
        self._clear_draft()

    def count_routed(self, layer: int, tokens_E: Tensor, num_invalid: int) -> None:
        self._draft_routed[layer] += tokens_E.cpu().numpy()
        self._draft_invalid += num_invalid

    def count_served(self, layer: int, tokens_S: Tensor) -> None:
        self._draft_served[layer, : len(tokens_S)] += tokens_S.cpu().numpy()

    def count_run(
        self, first_layer: int, routed_LE: Tensor, num_invalid: int, served_LS: Tensor
    ) -> None:
        """Of neighbouring layers at once."""
        layers = slice(first_layer, first_layer + len(routed_LE))
        self._draft_routed[layers] += routed_LE.cpu().numpy()
        self._draft_invalid += num_invalid
        self._draft_served[layers, : served_LS.shape[1]] += served_LS.cpu().numpy()

    def commit(self) -> None:
        with self._lock:
            self._routed_LE += self.draft_routed_LE
            self._served_LS += self._draft_served_LS
            self._invalid += self._draft_invalid
        self._clear_draft()

    def discard(self) -> None:
        """Forget the step under way."""
        self._clear_draft()

    def resize(self, num_slots: int) -> None:
        """Another number of slots a rank; counts of slots that remain go on."""
        with self._lock:
            resized = self._served_LS.new_zeros((len(self._served_LS), num_slots))
            kept = min(num_slots, self._served_LS.shape[1])
            resized[:, :kept] = self._served_LS[:, :kept]
            self._served_LS = resized
        self._clear_draft()

    def snapshot(self) -> LoadCounts:
        with self._lock:
            return LoadCounts(self._routed_LE.tolist(), self._served_LS.tolist(), self._invalid)

    def _clear_draft(self) -> None:
        self.draft_routed_LE = torch.zeros_like(self._routed_LE)
        """int64: what the step under way has counted so far."""
        self._draft_served_LS = torch.zeros_like(self._served_LS)
        # The same memory: a layer's few numbers are added sooner without torch.
        self._draft_routed = self.draft_routed_LE.numpy()
        self._draft_served = self._draft_served_LS.numpy()
        self._draft_invalid = 0
