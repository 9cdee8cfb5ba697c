"""Mixtral: softmax over all experts, the chosen weights renormalised."""

from __future__ import annotations

from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ExpertSpec, ModelSpec
from moe_worker.model.tensors import LayerTensors, ModelTensors, Roles, stored


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "mixtral", rms_eps=1e-5, positions=4096 * 32)
    num_layers = values["num_layers"]
    window = config.positive("sliding_window") if config.has("sliding_window") else None
    attention = hub_names.attention(config, windows=config.windows(num_layers, window))
    return ModelSpec(
        **values,
        moe_layers=tuple(range(num_layers)),
        attention=attention,
        rope=config.rope(attention.head_dim, values["max_positions"], theta=1e6),
        router=RouterSpec(
            num_experts=config.positive("num_local_experts"),
            top_k=config.positive("num_experts_per_tok", 2),
        ),
        expert=ExpertSpec(config.positive("intermediate_size")),
    )


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, _moe)


def _moe(spec: ModelSpec, layer_name: str) -> LayerTensors:
    stem = f"{layer_name}.block_sparse_moe"

    def expert(number: int) -> Roles:
        return hub_names.mlp_roles(
            f"{stem}.experts.{number}", spec.hidden, spec.expert.intermediate, ("w1", "w3", "w2")
        )

    return hub_names.mlp_tensors(
        router={"gate": stored(f"{stem}.gate.weight", spec.num_experts, spec.hidden)},
        expert=expert,
    )


FAMILY = Family("mixtral", "MixtralForCausalLM", describe, tensors)
