"""What a model's config.json may say, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_api.worker import KvConfig
from moe_worker.model.config import (
    ModelHasNoExperts,
    ModelUnreadable,
    load_architecture,
    parse_architecture,
    shape,
)
from moe_worker.model.spec import AttentionSpec

MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}


def changed(**changes: Any) -> dict[str, Any]:
    return {**MIXTRAL_8X7B, **changes}


def write(folder: Path, content: object, name: str = "config.json") -> Path:
    folder.joinpath(name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_mixtral_8x7b_is_read(tmp_path: Path) -> None:
    arch = load_architecture(write(tmp_path, MIXTRAL_8X7B))
    assert arch.num_layers == 32
    assert arch.moe_layers == tuple(range(32))
    assert (arch.num_experts, arch.top_k) == (8, 2)
    assert arch.attention == AttentionSpec(num_heads=32, num_kv_heads=8, head_dim=128)
    assert (arch.rope.kind, arch.rope.theta, arch.rope.dim) == ("default", 1e6, 128)
    assert (arch.rms_eps, arch.max_positions) == (1e-5, 32768)
    assert arch.dtype == "bfloat16"
    assert arch.eos_token_ids == {2}
    assert arch.router.renorm


@pytest.mark.parametrize(
    ("kv_dtype", "bytes_per_token"),
    [("auto", 131_072), ("bf16", 131_072), ("fp32", 262_144), ("nvfp4", 36_864)],
)
def test_shape_counts_the_bytes_that_the_operator_shows(
    kv_dtype: Any, bytes_per_token: int
) -> None:
    arch = parse_architecture(MIXTRAL_8X7B)
    told = shape(arch, KvConfig(dtype=kv_dtype))
    assert (told.layers, told.experts, told.top_k) == (32, 8, 2)
    assert told.bytes_per_expert == 3 * 14336 * 4096 * 2
    assert told.kv_bytes_per_token == bytes_per_token
    wide = shape(arch.held_in("float32"), KvConfig(dtype=kv_dtype))
    assert wide.bytes_per_expert == 2 * told.bytes_per_expert
    if kv_dtype == "auto":
        assert wide.kv_bytes_per_token == 262_144


def test_newer_spellings_are_read() -> None:
    config = changed(
        dtype="float32",
        rope_parameters={"rope_theta": 5000.0, "rope_type": "default"},
        head_dim=64,
        eos_token_id=[2, 5],
    )
    del config["torch_dtype"], config["rope_theta"]
    arch = parse_architecture(config)
    assert (arch.dtype, arch.rope.theta, arch.rope.dim) == ("float32", 5000.0, 64)
    assert arch.eos_token_ids == {2, 5}


def test_end_tokens_of_the_generation_config_are_added(tmp_path: Path) -> None:
    write(tmp_path, MIXTRAL_8X7B)
    write(tmp_path, {"eos_token_id": [7, 8]}, "generation_config.json")
    assert load_architecture(tmp_path).eos_token_ids == {2, 7, 8}


def test_a_sliding_window_belongs_to_every_layer_or_to_those_named() -> None:
    everywhere = parse_architecture(changed(sliding_window=4096))
    assert everywhere.max_positions == 32768
    assert {everywhere.attention.window(layer) for layer in range(32)} == {4096}
    types = ["sliding_attention", "full_attention"] * 16
    alternating = parse_architecture(changed(sliding_window=4096, layer_types=types)).attention
    assert (alternating.window(0), alternating.window(1)) == (4096, None)


def test_a_dense_model_has_no_experts(tmp_path: Path) -> None:
    dense = {key: value for key, value in MIXTRAL_8X7B.items() if "expert" not in key}
    with pytest.raises(ModelHasNoExperts, match="'llama' has no experts") as refusal:
        load_architecture(write(tmp_path, {**dense, "model_type": "llama"}))
    assert refusal.value.reason == "ModelHasNoExperts"


def test_a09_one_expert_is_nothing_to_place(tmp_path: Path) -> None:
    with pytest.raises(ModelHasNoExperts, match="num_local_experts is 1"):
        load_architecture(write(tmp_path, {**MIXTRAL_8X7B, "num_local_experts": 1}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["NewMoeForCausalLM"], "model_type": "new_moe"},
            r"'NewMoeForCausalLM' \(model_type 'new_moe'\) is not supported; supported: Mixtral",
        ),
        ({"architectures": None, "model_type": "new_moe"}, "'new_moe'.* is not supported"),
        ({"architectures": "Mixtral"}, "architectures must be a list of names"),
        ({"num_local_experts": 3, "num_experts_per_tok": 4}, "is 4: must be 1 to the 3 experts"),
        ({"num_attention_heads": 30}, "30 is not a multiple of num_key_value_heads 8"),
        ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, got 'many'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer"),
        ({"head_dim": 33}, "head_dim 33 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"torch_dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling: factor must be a positive"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"layer_types": ["full_attention"]}, "layer_types must be 32 of"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq' is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a positive number, got 'small'"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an id"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelUnreadable, match=message) as refusal:
        parse_architecture(changed(**changes))
    assert refusal.value.reason == "ModelUnreadable"


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelUnreadable, match=r"config\.json: No such file"):
        load_architecture(tmp_path)
    tmp_path.joinpath("config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelUnreadable, match=r"config\.json is not JSON"):
        load_architecture(tmp_path)
    with pytest.raises(ModelUnreadable, match="holds list, expected an object"):
        load_architecture(write(tmp_path, []))


def test_weights_are_held_in_the_wanted_dtype() -> None:
    arch = parse_architecture(MIXTRAL_8X7B)
    assert arch.held_in("auto") is arch
    assert arch.held_in("float16").dtype == "float16"
    with pytest.raises(ModelUnreadable, match="dtype 'fp8' is not supported"):
        arch.held_in("fp8")
