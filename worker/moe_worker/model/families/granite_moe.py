"""Granite-MoE: softmax over the chosen logits, fused experts, multipliers all along."""

from __future__ import annotations

from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ExpertSpec, ModelSpec, Multipliers
from moe_worker.model.tensors import LayerTensors, ModelTensors, Roles, Stored, stored


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "granitemoe", rms_eps=1e-6, positions=2048)
    bias = config.flag("attention_bias", False)
    attention = hub_names.attention(
        config,
        scale=config.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        output_bias=bias,
    )
    return ModelSpec(
        **values,
        moe_layers=tuple(range(values["num_layers"])),
        attention=attention,
        rope=config.rope(attention.head_dim, values["max_positions"], theta=1e4),
        router=RouterSpec(
            num_experts=config.positive("num_local_experts", 8),
            top_k=config.positive("num_experts_per_tok", 2),
            score="softmax_topk",
        ),
        expert=ExpertSpec(config.positive("intermediate_size")),
        multipliers=Multipliers(
            embedding=config.number("embedding_multiplier", 1.0),
            residual=config.number("residual_multiplier", 1.0),
            logits=config.number("logits_scaling", 1.0),
        ),
    )


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, _moe)


def _moe(spec: ModelSpec, layer_name: str) -> LayerTensors:
    stem = f"{layer_name}.block_sparse_moe"
    num_experts, hidden, inner = spec.num_experts, spec.hidden, spec.expert.intermediate

    def expert(number: int) -> Roles:
        both = Stored(f"{stem}.input_linear.weight", (num_experts, 2 * inner, hidden), number)
        down = Stored(f"{stem}.output_linear.weight", (num_experts, hidden, inner), number)
        return {"w13": (both,), "w2": (down,)}

    return hub_names.mlp_tensors(
        router={"gate": stored(f"{stem}.router.layer.weight", num_experts, hidden)}, expert=expert
    )


FAMILY = Family("granitemoe", "GraniteMoeForCausalLM", describe, tensors)
