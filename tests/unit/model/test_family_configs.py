"""What published models of each family say of themselves, as their config.json reads on the hub."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api.worker import KvConfig
from moe_kernels.router import RouterSpec
from moe_worker.model.config import parse_architecture, shape
from moe_worker.model.spec import (
    AttentionSpec,
    ModelHasNoExperts,
    ModelUnreadable,
    Multipliers,
    SharedExpertSpec,
)

QWEN15_MOE_A27B: dict[str, Any] = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "norm_topk_prob": False, "decoder_sparse_step": 1, "max_position_embeddings": 8192,
    "max_window_layers": 21, "sliding_window": 32768, "use_sliding_window": False,
    "rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151936, "eos_token_id": 151643,
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu",
    "attention_bias": False, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "max_position_embeddings": 40960, "max_window_layers": 48, "sliding_window": None,
    "use_sliding_window": False, "rope_scaling": None, "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 151936, "eos_token_id": 151645,
}  # fmt: skip
OLMOE_1B_7B: dict[str, Any] = {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_act": "silu",
    "attention_bias": False, "clip_qkv": None, "hidden_size": 2048, "intermediate_size": 1024,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    "max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vocab_size": 50304, "eos_token_id": 50279,
}  # fmt: skip
GRANITE_1B_A400M: dict[str, Any] = {
    "architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "hidden_act": "silu",
    "attention_bias": False, "attention_multiplier": 0.015625, "embedding_multiplier": 12.0,
    "logits_scaling": 6.0, "residual_multiplier": 0.22, "hidden_size": 1024,
    "intermediate_size": 512, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_local_experts": 32, "num_experts_per_tok": 8,
    "max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "vocab_size": 49155, "eos_token_id": 0,
}  # fmt: skip


def test_qwen15_moe_has_biases_and_a_gated_shared_expert() -> None:
    spec = parse_architecture(QWEN15_MOE_A27B)
    assert spec.attention == AttentionSpec(16, 16, 128, qkv_bias=True)
    assert spec.router == RouterSpec(60, 4, renorm=False)
    assert spec.shared_expert == SharedExpertSpec(5632, gated=True)
    assert (len(spec.moe_layers), spec.expert.intermediate, spec.rope.theta) == (24, 1408, 1e6)


def test_qwen3_30b_norms_its_heads_and_has_its_kv_bytes() -> None:
    spec = parse_architecture(QWEN3_30B_A3B)
    assert spec.attention == AttentionSpec(32, 4, 128, qk_norm="head")
    assert spec.router == RouterSpec(128, 8, renorm=True)
    bytes_per_token = {
        kv: shape(spec, KvConfig(dtype=kv)).kv_bytes_per_token for kv in ("bf16", "fp8", "nvfp4")
    }
    assert bytes_per_token == {"bf16": 98_304, "fp8": 49_152, "nvfp4": 27_648}
    told = shape(spec, KvConfig())
    assert (told.bytes_per_expert, told.expert_groups) == (3 * 768 * 2048 * 2, None)


def test_olmoe_norms_whole_projections() -> None:
    spec = parse_architecture(OLMOE_1B_7B)
    assert spec.attention == AttentionSpec(16, 16, 128, qk_norm="whole")
    assert spec.router == RouterSpec(64, 8, renorm=False)
    clipped = parse_architecture({**OLMOE_1B_7B, "clip_qkv": 8.0})
    assert clipped.grouped_query.clip_qkv == 8.0


def test_granite_multiplies_all_along() -> None:
    spec = parse_architecture(GRANITE_1B_A400M)
    assert spec.attention == AttentionSpec(16, 8, 64, scale=0.015625)
    assert spec.router == RouterSpec(32, 8, score="softmax_topk")
    assert spec.multipliers == Multipliers(embedding=12.0, residual=0.22, logits=6.0)
    assert spec.tie_embeddings


def test_layers_without_experts_are_not_moe_layers() -> None:
    spec = parse_architecture(
        {**QWEN3_30B_A3B, "mlp_only_layers": [1, 3], "decoder_sparse_step": 2}
    )
    assert spec.moe_layers == tuple(range(5, 48, 2))
    assert spec.dense_intermediate == 6144
    assert shape(spec, KvConfig()).layers == 22


def test_windows_of_qwen2_are_on_every_other_layer_up_to_a_last() -> None:
    windowed = {**QWEN15_MOE_A27B, "use_sliding_window": True, "sliding_window": 4096}
    spec = parse_architecture(windowed).attention
    assert [layer for layer in range(24) if spec.window(layer)] == list(range(0, 21, 2))
    assert spec.window(0) == 4096


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN15_MOE_A27B, {"qkv_bias": 1}, "qkv_bias must be true or false, got 1"),
        (QWEN15_MOE_A27B, {"num_experts_per_tok": 61}, "is 61: must be 1 to the 60 experts"),
        (QWEN15_MOE_A27B, {"moe_intermediate_size": None}, "moe_intermediate_size must be"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers must be a list of layers"),
        (QWEN3_30B_A3B, {"rope_scaling": {"type": "su"}}, "rope type 'su' is not supported"),
        (OLMOE_1B_7B, {"clip_qkv": -1.0}, "clip_qkv must be a positive number, got -1.0"),
        (OLMOE_1B_7B, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (GRANITE_1B_A400M, {"residual_multiplier": "much"}, "residual_multiplier must be"),
    ],
)
def test_what_a_family_cannot_be_is_refused_by_name(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelUnreadable, match=message):
        parse_architecture({**config, **changes})


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    config = {**QWEN3_30B_A3B, "mlp_only_layers": list(range(48))}
    with pytest.raises(ModelHasNoExperts, match="none of the 48 layers has experts"):
        parse_architecture(config)
