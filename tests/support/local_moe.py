"""All experts of a model on one rank, without exchange: the simplest `moe` callable.

Slot = expert id, every expert local. An oracle for the distributed layer: the same router, the same
kernels, rows added in top-k order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.experts import Experts, add_experts
from moe_kernels.gate import route
from moe_worker.model.second_half import ExpertHalf
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import Checkpoint, ExpertWeights


class LocalMoe:
    def __init__(self, checkpoint: Checkpoint, arch: ModelSpec) -> None:
        self.calls: list[int] = []
        """Tokens of every call, in order."""
        self._layers = [
            _stacked([checkpoint.read_expert(layer, e) for e in range(arch.num_experts)], arch)
            for layer in arch.moe_layers
        ]

    def __call__(self, ordinal: int, x_TH: Tensor, half: ExpertHalf) -> Tensor:
        self.calls.append(x_TH.shape[0])
        normed_TH, ids_TK, weights_TK = route(x_TH, half.gate)
        out_TH, _ = add_experts(
            x_TH,
            normed_TH,
            ids_TK,
            weights_TK,
            self._layers[ordinal],
            shared=half.shared,
            multiplier=half.multiplier,
        )
        return out_TH

    def whole(self, *_: object) -> None:
        """Layer by layer, always."""

    def forward(self, *_: object) -> None:
        """The same."""


class BrokenMoe(LocalMoe):
    """A peer is gone when the second expert layer is asked for."""

    def __init__(self, moe: LocalMoe) -> None:
        self._moe = moe

    def __call__(self, ordinal: int, x_TH: Tensor, half: ExpertHalf) -> Tensor:
        if ordinal == 1:
            raise ConnectionError("a peer is gone")
        return self._moe(ordinal, x_TH, half)


def _stacked(experts: list[ExpertWeights], arch: ModelSpec) -> Experts:
    def stack(part: str) -> Tensor:
        return torch.stack([getattr(expert, part) for expert in experts])

    biases = [stack(part) for part in ("b13_2I", "b2_H")] if arch.expert.bias else [None, None]
    return Experts(stack("w13_2IH"), stack("w2_HI"), arch.expert.act, *biases)
