"""Qwen2-MoE: biases of q, k and v, a gated shared expert, and some layers without experts."""

from __future__ import annotations

from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ExpertSpec, ModelSpec, SharedExpertSpec
from moe_worker.model.tensors import LayerTensors, ModelTensors, stored


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "qwen2_moe", rms_eps=1e-6, positions=32768)
    attention = hub_names.attention(
        config,
        qkv_bias=config.flag("qkv_bias", True),
        windows=_windows(config, values["num_layers"]),
    )
    return ModelSpec(
        **values,
        moe_layers=hub_names.sparse_layers(config),
        attention=attention,
        rope=config.rope(attention.head_dim, values["max_positions"], theta=1e4),
        router=RouterSpec(
            num_experts=config.positive("num_experts"),
            top_k=config.positive("num_experts_per_tok", 4),
            renorm=config.flag("norm_topk_prob", False),
        ),
        expert=ExpertSpec(config.positive("moe_intermediate_size")),
        shared_expert=SharedExpertSpec(
            config.positive("shared_expert_intermediate_size", 5632), gated=True
        ),
        dense_intermediate=config.positive("intermediate_size", 5632),
    )


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Every other one of the first `max_window_layers` layers, where windows are switched on."""
    if not config.flag("use_sliding_window", False):
        return ()
    window = config.positive("sliding_window", 4096)
    if config.has("layer_types"):
        return config.windows(num_layers, window)
    last = config.positive("max_window_layers", 28)
    return tuple(window if i % 2 == 0 and i < last else None for i in range(num_layers))


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, _moe)


def _moe(spec: ModelSpec, layer_name: str) -> LayerTensors:
    assert spec.shared_expert is not None, "every layer with experts has a shared one"
    stem, shared = f"{layer_name}.mlp", spec.shared_expert.intermediate
    return hub_names.mlp_tensors(
        router=hub_names.gate_roles(spec, stem),
        shared={
            **hub_names.mlp_roles(f"{stem}.shared_expert", spec.hidden, shared),
            "gate": stored(f"{stem}.shared_expert_gate.weight", 1, spec.hidden),
        },
        expert=hub_names.numbered_experts(spec, stem),
    )


FAMILY = Family("qwen2_moe", "Qwen2MoeForCausalLM", describe, tensors)
