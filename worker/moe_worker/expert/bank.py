"""The experts' weights on this rank: S slots a layer, allocated once.

The engine computes from slots that the table in force names; a staging thread writes only slots
that it does not name; peers read slots that it does. `in_force_LS` says which is which and is
replaced as a whole at a switch.

Neighbours: `migrate` fills slots, `layer` computes with them, the control API hands them to peers.

Letters: L MoE layers, S slots, I expert intermediate, H hidden.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_worker.model.weights import ExpertWeights

SlotsLS = npt.NDArray[np.int32]


class ExpertBank:
    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        intermediate: int,
        hidden: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        self.intermediate, self.hidden, self.dtype = intermediate, hidden, dtype
        self.device = torch.device(device)
        self.w13_LS2IH = [
            self._empty(num_slots, 2 * intermediate, hidden) for _ in range(num_layers)
        ]
        self.w2_LSHI = [self._empty(num_slots, hidden, intermediate) for _ in range(num_layers)]
        self.in_force_LS: SlotsLS = np.full((num_layers, num_slots), -1, dtype=np.int32)
        # Held while a slot's bytes are read or written: a peer's read of a slot that has just
        # left the table ends before staging writes into it.
        self._lock = threading.Lock()

    @property
    def num_layers(self) -> int:
        return len(self.w13_LS2IH)

    @property
    def num_slots(self) -> int:
        return self.w13_LS2IH[0].shape[0]

    @property
    def bytes_per_expert(self) -> int:
        return 3 * self.intermediate * self.hidden * self.dtype.itemsize

    def write(
        self,
        layer: int,
        slot: int,
        weights: ExpertWeights,
        wanted: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Put an expert into a slot; False when by then it is not `wanted` any more."""
        with self._lock:
            if not wanted():
                return False
            self.w13_LS2IH[layer][slot].copy_(weights.w13_2IH)
            self.w2_LSHI[layer][slot].copy_(weights.w2_HI)
            return True

    def read_live(self, layer: int, slot: int, expert: int) -> bytes | None:
        """The bytes of a slot (w13, then w2), or None when the table in force has not that expert
        there."""
        if not (0 <= layer < self.num_layers and 0 <= slot < self.num_slots and expert >= 0):
            return None
        with self._lock:
            if self.in_force_LS[layer, slot] != expert:
                return None
            halves = (self.w13_LS2IH[layer][slot], self.w2_LSHI[layer][slot])
            return b"".join(_bytes_of(half) for half in halves)

    def weights_at(self, layer: int, slot: int) -> ExpertWeights:
        """A copy of a slot's weights."""
        with self._lock:
            return ExpertWeights(
                self.w13_LS2IH[layer][slot].clone(), self.w2_LSHI[layer][slot].clone()
            )

    def from_bytes(self, raw: bytearray) -> ExpertWeights:
        """Weights of one expert as `read_live` gave them; they share the buffer.

        Raises:
            ValueError: not the length of an expert of this model.
        """
        if len(raw) != self.bytes_per_expert:
            raise ValueError(f"{len(raw)} bytes, an expert here has {self.bytes_per_expert}")
        flat = torch.frombuffer(raw, dtype=self.dtype)
        border = 2 * self.intermediate * self.hidden
        return ExpertWeights(
            flat[:border].reshape(2 * self.intermediate, self.hidden),
            flat[border:].reshape(self.hidden, self.intermediate),
        )

    def resize(self, num_slots: int) -> None:
        """Another number of slots a layer, layer by layer; slots that remain keep their weights."""
        kept = min(num_slots, self.num_slots)
        with self._lock:
            for weights in (self.w13_LS2IH, self.w2_LSHI):
                for layer, old in enumerate(weights):
                    weights[layer] = self._empty(num_slots, *old.shape[1:])
                    weights[layer][:kept] = old[:kept]
            in_force = np.full((self.num_layers, num_slots), -1, dtype=np.int32)
            in_force[:, :kept] = self.in_force_LS[:, :kept]
            self.in_force_LS = in_force

    def _empty(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _bytes_of(weights: Tensor) -> bytes:
    return weights.reshape(-1).view(torch.uint8).to("cpu").numpy().tobytes()
