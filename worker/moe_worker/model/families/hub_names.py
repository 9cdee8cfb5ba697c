"""What most families spell alike: fields of config.json, and tensors of a Llama-like layer.

Neighbours: the families, which add what is their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from moe_worker.model.fields import Fields
from moe_worker.model.spec import AttentionSpec, ModelSpec, dtype_name
from moe_worker.model.tensors import LayerTensors, ModelTensors, Roles, Stored, stored

MAX_LAYERS = 4096
MLP_NAMES = ("gate_proj", "up_proj", "down_proj")


def model_values(config: Fields, family: str, *, rms_eps: float, positions: int) -> dict[str, Any]:
    """The fields of `ModelSpec` that do not depend on the family but for its defaults."""
    config.only("hidden_act", "silu")
    return {
        "family": family,
        "num_layers": num_layers(config),
        "hidden": config.positive("hidden_size"),
        "vocab_size": config.positive("vocab_size"),
        "max_positions": config.positive("max_position_embeddings", positions),
        "rms_eps": config.number("rms_norm_eps", rms_eps),
        "tie_embeddings": config.flag("tie_word_embeddings", False),
        "dtype": dtype_name(config.get("dtype", config.get("torch_dtype", "float32"))),
        "eos_token_ids": config.token_ids("eos_token_id"),
    }


def num_layers(config: Fields) -> int:
    """Every description has a value for each layer: a wrong number must not fill the memory."""
    return config.positive("num_hidden_layers", most=MAX_LAYERS)


def attention(config: Fields, **more: Any) -> AttentionSpec:
    num_heads = config.positive("num_attention_heads")
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.positive("num_key_value_heads", num_heads),
        head_dim=config.positive("head_dim", max(1, config.positive("hidden_size") // num_heads)),
        **more,
    )


def sparse_layers(config: Fields) -> tuple[int, ...]:
    """`decoder_sparse_step` and `mlp_only_layers` say which layers have experts."""
    count = num_layers(config)
    step = config.positive("decoder_sparse_step", 1)
    dense = config.layer_list("mlp_only_layers", count)
    return tuple(i for i in range(count) if i not in dense and (i + 1) % step == 0)


def model_tensors(
    spec: ModelSpec,
    moe: Callable[[ModelSpec, str], LayerTensors],
    attention_roles: Callable[[ModelSpec, str], Roles] | None = None,
) -> ModelTensors:
    """All tensors, given those of a MoE layer's experts (`moe`, by the layer's name) and, where it
    is not grouped-query attention, those of attention."""
    roles_of = attention_roles or grouped_query_roles

    def layer(index: int) -> LayerTensors:
        name = f"model.layers.{index}"
        sparse = index in spec.moe_layers
        mlp = moe(spec, name) if sparse else dense_layer(spec, name)
        return replace(
            mlp,
            attention_norm=stored(f"{name}.input_layernorm.weight", spec.hidden),
            attention=roles_of(spec, name),
            mlp_norm=stored(f"{name}.post_attention_layernorm.weight", spec.hidden),
        )

    return ModelTensors(
        embedding=stored("model.embed_tokens.weight", spec.vocab_size, spec.hidden),
        norm=stored("model.norm.weight", spec.hidden),
        lm_head=(
            None if spec.tie_embeddings else stored("lm_head.weight", spec.vocab_size, spec.hidden)
        ),
        layers=tuple(layer(index) for index in range(spec.num_layers)),
    )


def mlp_tensors(**roles: Any) -> LayerTensors:
    """The part of a layer after attention; `model_tensors` adds the rest."""
    return LayerTensors(attention_norm=(), attention={}, mlp_norm=(), **roles)


def dense_layer(spec: ModelSpec, name: str) -> LayerTensors:
    return mlp_tensors(dense=mlp_roles(f"{name}.mlp", spec.hidden, spec.dense_intermediate))


def mlp_roles(
    stem: str, hidden: int, intermediate: int, names: tuple[str, str, str] = MLP_NAMES
) -> Roles:
    """A gated network of three matrices, named in the order gate, up, down."""
    gate, up, down = (f"{stem}.{name}.weight" for name in names)
    return {
        "w13": (Stored(gate, (intermediate, hidden)), Stored(up, (intermediate, hidden))),
        "w2": stored(down, hidden, intermediate),
    }


def gate_roles(spec: ModelSpec, stem: str) -> Roles:
    return {"gate": stored(f"{stem}.gate.weight", spec.num_experts, spec.hidden)}


def numbered_experts(spec: ModelSpec, stem: str) -> Callable[[int], Roles]:
    """Three matrices for each expert."""

    def expert(number: int) -> Roles:
        return mlp_roles(f"{stem}.experts.{number}", spec.hidden, spec.expert.intermediate)

    return expert


def grouped_query_roles(spec: ModelSpec, layer_name: str) -> Roles:
    """Separate q, k, v and o projections, and what the description asks for besides."""
    attention, stem = spec.grouped_query, f"{layer_name}.self_attn"
    query_rows = attention.num_heads * attention.head_dim
    kv_rows = attention.num_kv_heads * attention.head_dim
    rows = {"q": query_rows, "k": kv_rows, "v": kv_rows}
    roles: dict[str, tuple[Stored, ...]] = {
        "qkv": tuple(
            Stored(f"{stem}.{name}_proj.weight", (count, spec.hidden))
            for name, count in rows.items()
        ),
        "o": stored(f"{stem}.o_proj.weight", spec.hidden, query_rows),
    }
    if attention.qkv_bias:
        roles["qkv_bias"] = tuple(
            Stored(f"{stem}.{name}_proj.bias", (count,)) for name, count in rows.items()
        )
    if attention.output_bias:
        roles["o_bias"] = stored(f"{stem}.o_proj.bias", spec.hidden)
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "whole"
        for name, count in (("q", query_rows), ("k", kv_rows)):
            width = count if whole else attention.head_dim
            roles[f"{name}_norm"] = stored(f"{stem}.{name}_norm.weight", width)
    if attention.sinks:
        roles["sinks"] = stored(f"{stem}.sinks", attention.num_heads, float32=True)
    return roles
