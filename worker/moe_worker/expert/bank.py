"""The experts' weights on this rank: S slots a layer, allocated once.

The engine computes from slots that the table in force names; a staging thread writes only slots
that it does not name; peers read slots that it does. `in_force_LS` says which is which and is
replaced as a whole at a switch.

Neighbours: `migrate` fills slots, `layer` computes with them, the control API hands them to peers.

Letters: L MoE layers, S slots, I expert intermediate, H hidden.
"""

from __future__ import annotations

import math
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
        has_bias: bool = False,
    ) -> None:
        self.intermediate, self.hidden, self.dtype = intermediate, hidden, dtype
        self.device, self.has_bias = torch.device(device), has_bias
        self.w13_LS2IH = [
            self._empty(num_slots, 2 * intermediate, hidden) for _ in range(num_layers)
        ]
        self.w2_LSHI = [self._empty(num_slots, hidden, intermediate) for _ in range(num_layers)]
        layers_with_bias = range(num_layers if has_bias else 0)
        self.b13_LS2I = [self._empty(num_slots, 2 * intermediate) for _ in layers_with_bias]
        self.b2_LSH = [self._empty(num_slots, hidden) for _ in layers_with_bias]
        self.num_resizes = 0
        """Another number, other tensors."""
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
        return sum(math.prod(shape) for shape in self._part_shapes()) * self.dtype.itemsize

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
            given = (weights.w13_2IH, weights.w2_HI, weights.b13_2I, weights.b2_H)
            for part, source in zip(self._parts(layer, slot), given, strict=False):
                assert source is not None, "experts of one model all have biases or none has"
                part.copy_(source)
            return True

    def read_live(self, layer: int, slot: int, expert: int) -> bytes | None:
        """The bytes of a slot (w13, w2, then b13 and b2 where there are biases), or None when the
        table in force has not that expert there."""
        if not (0 <= layer < self.num_layers and 0 <= slot < self.num_slots and expert >= 0):
            return None
        with self._lock:
            if self.in_force_LS[layer, slot] != expert:
                return None
            return b"".join(_bytes_of(part) for part in self._parts(layer, slot))

    def weights_at(self, layer: int, slot: int) -> ExpertWeights:
        """A copy of a slot's weights."""
        with self._lock:
            return ExpertWeights(*(part.clone() for part in self._parts(layer, slot)))

    def from_bytes(self, raw: bytearray) -> ExpertWeights:
        """Weights of one expert as `read_live` gave them; they share the buffer.

        Raises:
            ValueError: not the length of an expert of this model.
        """
        if len(raw) != self.bytes_per_expert:
            raise ValueError(f"{len(raw)} bytes, an expert here has {self.bytes_per_expert}")
        shapes = self._part_shapes()
        flat = torch.frombuffer(raw, dtype=self.dtype)
        parts = torch.split(flat, [math.prod(shape) for shape in shapes])
        return ExpertWeights(*(part.view(shape) for part, shape in zip(parts, shapes, strict=True)))

    def resize(self, num_slots: int) -> None:
        """Another number of slots a layer, layer by layer; slots that remain keep their weights."""
        kept = min(num_slots, self.num_slots)
        with self._lock:
            for weights in (self.w13_LS2IH, self.w2_LSHI, self.b13_LS2I, self.b2_LSH):
                for layer, old in enumerate(weights):
                    weights[layer] = self._empty(num_slots, *old.shape[1:])
                    weights[layer][:kept] = old[:kept]
            in_force = np.full((self.num_layers, num_slots), -1, dtype=np.int32)
            in_force[:, :kept] = self.in_force_LS[:, :kept]
            self.in_force_LS = in_force
            self.num_resizes += 1

    def _part_shapes(self) -> list[tuple[int, ...]]:
        """Of an expert's tensors, in the order of `ExpertWeights`."""
        wide, hidden = 2 * self.intermediate, self.hidden
        shapes: list[tuple[int, ...]] = [(wide, hidden), (hidden, self.intermediate)]
        return [*shapes, (wide,), (hidden,)] if self.has_bias else shapes

    def _parts(self, layer: int, slot: int) -> list[Tensor]:
        parts = [self.w13_LS2IH[layer][slot], self.w2_LSHI[layer][slot]]
        if self.has_bias:
            parts += [self.b13_LS2I[layer][slot], self.b2_LSH[layer][slot]]
        return parts

    def _empty(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def _bytes_of(weights: Tensor) -> bytes:
    return weights.reshape(-1).view(torch.uint8).to("cpu").numpy().tobytes()
