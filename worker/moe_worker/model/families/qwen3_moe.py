"""Qwen3-MoE: queries and keys normed head by head, no shared expert, some layers may be dense."""

from __future__ import annotations

from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ExpertSpec, ModelSpec
from moe_worker.model.tensors import ModelTensors


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "qwen3_moe", rms_eps=1e-6, positions=32768)
    bias, window = config.flag("attention_bias", False), None
    if config.flag("use_sliding_window", False):
        window = config.positive("sliding_window", 4096)
    attention = hub_names.attention(
        config,
        qk_norm="head",
        qkv_bias=bias,
        output_bias=bias,
        windows=config.windows(values["num_layers"], window),
    )
    return ModelSpec(
        **values,
        moe_layers=hub_names.sparse_layers(config),
        attention=attention,
        rope=config.rope(attention.head_dim, values["max_positions"], theta=1e4),
        router=RouterSpec(
            # transformers writes the second name, the hub's files have the first.
            num_experts=config.positive("num_experts", config.get("num_local_experts")),
            top_k=config.positive("num_experts_per_tok", 8),
            renorm=config.flag("norm_topk_prob", False),
        ),
        expert=ExpertSpec(config.positive("moe_intermediate_size")),
        dense_intermediate=config.positive("intermediate_size", 6144),
    )


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, hub_names.numbered_moe)


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", describe, tensors)
