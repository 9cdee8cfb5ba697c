"""What follows attention in a layer: experts, or a dense network.

Neighbours: `transformer` runs them; `moe_worker.expert.layer` computes an `ExpertHalf`, with the
experts of all ranks; `weights` has the tensors.

Letters: T tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from moe_kernels.gate import Gate
from moe_kernels.mlp import Mlp, add_mlp
from moe_kernels.norm_rope import rms_norm
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import LayerWeights, MlpWeights


@dataclass(frozen=True, eq=False)
class ExpertHalf:
    """x + multiplier · (the routed experts + the shared one of norm(x))."""

    gate: Gate
    shared: Mlp | None
    multiplier: float


@dataclass(frozen=True, eq=False)
class DenseHalf:
    """x + multiplier · network(norm(x))."""

    norm_H: Tensor
    norm_eps: float
    network: Mlp
    multiplier: float

    def __call__(self, x_TH: Tensor) -> Tensor:
        normed_TH = rms_norm(x_TH, self.norm_H, self.norm_eps)
        return add_mlp(x_TH, normed_TH, self.network, self.multiplier)


def build_second_half(arch: ModelSpec, weights: LayerWeights) -> ExpertHalf | DenseHalf:
    def network(tensors: MlpWeights) -> Mlp:
        return Mlp(tensors.w13_2IH, tensors.w2_HI, arch.expert.act, tensors.gate_1H)

    norm_H, eps, multiplier = weights.mlp_norm_H, arch.rms_eps, arch.multipliers.residual
    router = weights.router
    if router is None:
        assert weights.dense is not None, "a layer has experts or is dense"
        return DenseHalf(norm_H, eps, network(weights.dense), multiplier)
    biases = router.logit_bias_E, router.selection_bias_E
    gate = Gate(arch.router, norm_H, eps, router.gate_EH, *biases)
    shared = None if weights.shared is None else network(weights.shared)
    return ExpertHalf(gate, shared, multiplier)
