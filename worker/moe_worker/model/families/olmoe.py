"""OLMoE: queries and keys normed as a whole and clipped, routing weights not renormalised."""

from __future__ import annotations

from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ExpertSpec, ModelSpec
from moe_worker.model.tensors import ModelTensors


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "olmoe", rms_eps=1e-5, positions=4096)
    bias = config.flag("attention_bias", False)
    attention = hub_names.attention(
        config,
        qk_norm="whole",
        qkv_bias=bias,
        output_bias=bias,
        clip_qkv=config.number("clip_qkv") if config.has("clip_qkv") else None,
    )
    return ModelSpec(
        **values,
        moe_layers=tuple(range(values["num_layers"])),
        attention=attention,
        rope=config.rope(attention.head_dim, values["max_positions"], theta=1e4),
        router=RouterSpec(
            num_experts=config.positive("num_experts"),
            top_k=config.positive("num_experts_per_tok", 8),
            renorm=config.flag("norm_topk_prob", False),
        ),
        expert=ExpertSpec(config.positive("intermediate_size")),
    )


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, hub_names.numbered_moe)


FAMILY = Family("olmoe", "OlmoeForCausalLM", describe, tensors)
