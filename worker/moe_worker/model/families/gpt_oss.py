"""gpt-oss: attention sinks, windows in every other layer, biases everywhere, experts in MXFP4.

The gate's bias is part of the logits; the weights are a softmax over the chosen ones. Experts are
fused tensors: [experts, inputs, outputs] as floats, [experts, outputs, inputs] as MXFP4, in both
with gates and ups alternating.
"""

from __future__ import annotations

from dataclasses import replace

from moe_kernels.activation import SwigluOai
from moe_kernels.router import RouterSpec
from moe_worker.model.families import hub_names
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.mxfp4 import Mxfp4
from moe_worker.model.spec import ExpertSpec, ModelSpec, RopeSpec
from moe_worker.model.tensors import LayerTensors, ModelTensors, Roles, Stored, stored

THETA = 150000.0


def describe(config: Fields) -> ModelSpec:
    values = hub_names.model_values(config, "gpt_oss", rms_eps=1e-5, positions=131072)
    if not config.has("dtype") and not config.has("torch_dtype"):
        # The published configs name none; what they do not store as MXFP4 is bfloat16.
        values["dtype"] = "bfloat16"
    num_layers = values["num_layers"]
    bias = config.flag("attention_bias", True)
    method = config.object("quantization_config").get("quant_method")
    attention = replace(
        hub_names.attention(
            config,
            qkv_bias=bias,
            output_bias=bias,
            sinks=True,
            windows=_windows(config, num_layers),
        ),
        head_dim=config.positive("head_dim", 64),
    )
    return ModelSpec(
        **values,
        moe_layers=tuple(range(num_layers)),
        attention=attention,
        rope=_rope(config, attention.head_dim, values["max_positions"]),
        router=RouterSpec(
            num_experts=config.positive("num_local_experts", 128),
            top_k=config.positive("num_experts_per_tok", 4),
            score="softmax_topk",
            logit_bias=True,
        ),
        expert=ExpertSpec(
            config.positive("intermediate_size"),
            act=SwigluOai(
                limit=config.number("swiglu_limit", 7.0),
                alpha=config.number("swiglu_alpha", 1.702),
            ),
            bias=True,
        ),
        encoding=Mxfp4() if method == "mxfp4" else None,
    )


def tensors(spec: ModelSpec) -> ModelTensors:
    return hub_names.model_tensors(spec, _moe)


def _windows(config: Fields, num_layers: int) -> tuple[int | None, ...]:
    window = config.positive("sliding_window", 128)
    if config.has("layer_types"):
        return config.windows(num_layers, window)
    return tuple(None if layer % 2 else window for layer in range(num_layers))


def _rope(config: Fields, head_dim: int, max_positions: int) -> RopeSpec:
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return config.rope(head_dim, max_positions, THETA)
    theta = config.number("rope_theta", THETA)
    return RopeSpec(head_dim, theta, "yarn", factor=32.0, original_positions=4096, truncate=False)


def _moe(spec: ModelSpec, layer_name: str) -> LayerTensors:
    stem = f"{layer_name}.mlp"
    num_experts, hidden, inner = spec.num_experts, spec.hidden, spec.expert.intermediate

    def matrix(name: str, expert: int, outputs: int, inputs: int) -> Stored:
        name = f"{stem}.experts.{name}"
        if spec.encoding is not None:
            return Stored(name, (num_experts, outputs, inputs), expert, encoding=spec.encoding)
        return Stored(name, (num_experts, inputs, outputs), expert, transposed=True)

    def bias(name: str, expert: int, outputs: int) -> Stored:
        return Stored(f"{stem}.experts.{name}_bias", (num_experts, outputs), expert)

    def expert(number: int) -> Roles:
        both = matrix("gate_up_proj", number, 2 * inner, hidden)
        both_bias = bias("gate_up_proj", number, 2 * inner)
        return {
            "w13": (replace(both, interleaved=True),),
            "b13": (replace(both_bias, interleaved=True),),
            "w2": (matrix("down_proj", number, hidden, inner),),
            "b2": (bias("down_proj", number, hidden),),
        }

    return hub_names.mlp_tensors(
        router={
            "gate": stored(f"{stem}.router.weight", num_experts, hidden),
            "logit_bias": stored(f"{stem}.router.bias", num_experts, float32=True),
        },
        expert=expert,
    )


FAMILY = Family("gpt_oss", "GptOssForCausalLM", describe, tensors, quantisations=("mxfp4",))
