"""What DeepSeek-V2 and V3 have in common: latent attention, dense layers first, shared experts.

Neighbours: `deepseek_v2` and `deepseek_v3` add their routers, `model.mla` computes the attention,
`model.fp8_blocks` reads the checkpoints that are stored in FP8.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from moe_worker.model.families import hub_names
from moe_worker.model.fields import Fields
from moe_worker.model.fp8_blocks import Fp8Blocks, read_fp8_blocks
from moe_worker.model.spec import ExpertSpec, LatentSpec, ModelSpec, RopeSpec, SharedExpertSpec
from moe_worker.model.tensors import LayerTensors, ModelTensors, Pieces, Roles, stored


def common_values(
    config: Fields, family: str, *, positions: int, dense_layers: int, shared_experts: int
) -> dict[str, Any]:
    """All fields of `ModelSpec` but the router's; the numbers are the family's defaults."""
    values = hub_names.model_values(config, family, rms_eps=1e-6, positions=positions)
    config.only("moe_layer_freq", 1)
    config.only("mlp_bias", False)
    rope_dim = config.positive("qk_rope_head_dim", 64)
    rope = config.rope(rope_dim, values["max_positions"], theta=1e4)
    inner = config.positive("moe_intermediate_size")
    return {
        **values,
        "moe_layers": tuple(range(_first_sparse(config, dense_layers), values["num_layers"])),
        "attention": _attention(config, rope),
        "rope": rope,
        "expert": ExpertSpec(inner),
        "shared_expert": SharedExpertSpec(
            inner * config.positive("n_shared_experts", shared_experts)
        ),
        "dense_intermediate": config.positive("intermediate_size"),
        "encoding": read_fp8_blocks(config),
    }


def tensors(spec: ModelSpec) -> ModelTensors:
    """Layers after the last one, which predict further tokens ahead, are not read."""
    plain = hub_names.model_tensors(spec, _moe, _latent_roles)
    layers = (replace(layer, dense=_encoded(spec, layer.dense)) for layer in plain.layers)
    return replace(plain, layers=tuple(layers))


def _first_sparse(config: Fields, dense_layers: int) -> int:
    value = config.get("first_k_dense_replace", dense_layers)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise config.wrong("first_k_dense_replace", "a number of layers", value)
    return value


def _attention(config: Fields, rope: RopeSpec) -> LatentSpec:
    num_heads = config.positive("num_attention_heads")
    config.only("num_key_value_heads", num_heads)
    nope_dim = config.positive("qk_nope_head_dim", 128)
    scale = (nope_dim + rope.dim) ** -0.5
    stretch = config.object("rope_parameters", "rope_scaling").number_or_zero("mscale_all_dim")
    if stretch and rope.kind != "default" and rope.factor > 1:
        # YaRN's correction of the temperature, once for queries and once for keys.
        scale *= (0.1 * stretch * math.log(rope.factor) + 1.0) ** 2
    return LatentSpec(
        num_heads=num_heads,
        query_rank=config.positive("q_lora_rank") if config.has("q_lora_rank") else None,
        latent_dim=config.positive("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        value_dim=config.positive("v_head_dim", 128),
        scale=scale,
        bias=config.flag("attention_bias", False),
        rope_interleaved=config.flag("rope_interleave", True),
    )


def _moe(spec: ModelSpec, layer_name: str) -> LayerTensors:
    assert spec.shared_expert is not None, "every layer with experts has shared ones"
    stem = f"{layer_name}.mlp"
    # The gate decides by close comparisons: it is computed in float32 whatever the rest is held in.
    router = {"gate": stored(f"{stem}.gate.weight", spec.num_experts, spec.hidden, float32=True)}
    if spec.router.bias_for_selection:
        name = f"{stem}.gate.e_score_correction_bias"
        router["selection_bias"] = stored(name, spec.num_experts, float32=True)
    expert = hub_names.numbered_experts(spec, stem)
    shared = hub_names.mlp_roles(
        f"{stem}.shared_experts", spec.hidden, spec.shared_expert.intermediate
    )
    return hub_names.mlp_tensors(
        router=router,
        shared=_encoded(spec, shared),
        expert=lambda number: _encoded(spec, expert(number)),
    )


def _latent_roles(spec: ModelSpec, layer_name: str) -> Roles:
    attention, stem = spec.attention, f"{layer_name}.self_attn"
    assert isinstance(attention, LatentSpec), "described by this family"
    heads, hidden = attention.num_heads, spec.hidden
    query_rows = heads * (attention.nope_dim + attention.rope_dim)
    kv_rows = attention.latent_dim + attention.rope_dim
    per_head = attention.nope_dim + attention.value_dim

    def matrix(name: str, rows: int, columns: int) -> Pieces:
        return stored(f"{stem}.{name}.weight", rows, columns)

    roles = {
        "kv_a": matrix("kv_a_proj_with_mqa", kv_rows, hidden),
        "kv_a_norm": stored(f"{stem}.kv_a_layernorm.weight", attention.latent_dim),
        "kv_b": matrix("kv_b_proj", heads * per_head, attention.latent_dim),
        "o": matrix("o_proj", hidden, heads * attention.value_dim),
    }
    rank = attention.query_rank
    if rank is None:
        roles["q"] = matrix("q_proj", query_rows, hidden)
    else:
        roles["q_a"] = matrix("q_a_proj", rank, hidden)
        roles["q_a_norm"] = stored(f"{stem}.q_a_layernorm.weight", rank)
        roles["q_b"] = matrix("q_b_proj", query_rows, rank)
    if attention.bias:
        roles["kv_a_bias"] = stored(f"{stem}.kv_a_proj_with_mqa.bias", kv_rows)
        roles["o_bias"] = stored(f"{stem}.o_proj.bias", hidden)
        if rank is not None:
            roles["q_a_bias"] = stored(f"{stem}.q_a_proj.bias", rank)
    return _encoded(spec, roles)


def _encoded(spec: ModelSpec, roles: Roles) -> Roles:
    return spec.encoding.applied(roles) if isinstance(spec.encoding, Fp8Blocks) else roles
