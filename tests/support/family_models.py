"""Random checkpoints of each family, made by `transformers` in the hub's layout, and its numbers.

Default initialisation hides faults: gates of std 0.02 are near-ties, biases are zero, norms are
one. So gates are multiplied by 40 and other matrices but embeddings by 4, which makes a text depend
on more than its last token; biases are drawn and norms are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.one_rank import OneRank, Trace

GATE_FACTOR, MATRIX_FACTOR, BIAS_STD = 40.0, 4.0, 0.1
GATE_NAMES = (
    "mlp.gate.weight",
    "block_sparse_moe.gate.weight",
    "router.weight",
    "gate.layer.weight",
)
NUM_TOKENS = 48
VOCABULARY = 256

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CLASSES: dict[str, tuple[type, type]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "granitemoe": (GraniteMoeConfig, GraniteMoeForCausalLM),
}
SEEDS = {"mixtral": 3, "qwen2_moe": 5, "qwen3_moe": 1, "olmoe": 2, "granitemoe": 2}
"""Of models whose greedy text goes through many tokens."""
OWN: dict[str, dict[str, Any]] = {
    "mixtral": {
        "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": 40,
    },
    "qwen2_moe": {
        "intermediate_size": 80, "moe_intermediate_size": 48, "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 56, "num_experts": 8, "num_experts_per_tok": 4,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "intermediate_size": 80, "moe_intermediate_size": 40, "num_key_value_heads": 2,
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "decoder_sparse_step": 2, "num_hidden_layers": 4,
    },
    "olmoe": {
        "intermediate_size": 48, "num_key_value_heads": 2, "num_experts": 8,
        "num_experts_per_tok": 3, "clip_qkv": 1.0,
    },
    "granitemoe": {
        "intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 3, "tie_word_embeddings": True, "embedding_multiplier": 0.8,
        "residual_multiplier": 1.3, "attention_multiplier": 0.4, "logits_scaling": 1.5,
    },
}  # fmt: skip


def save_family(
    path: Path,
    family: str,
    *,
    seed: int | None = None,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **changes: Any,
) -> Path:
    """Write a random model of the family, with `changes` to its config; returns `path`."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SIZES, **OWN[family], **changes})
    torch.manual_seed(SEEDS[family] if seed is None else seed)
    model = model_class(config)
    spread(model)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Move every parameter away from where it decides nothing."""
    for name, parameter in model.named_parameters():
        if name.endswith(GATE_NAMES):
            parameter.mul_(GATE_FACTOR)
        elif "norm" in name:
            parameter.uniform_(0.6, 1.4)
        elif name.endswith("bias") or parameter.dim() < 2:
            parameter.normal_(0.0, BIAS_STD)
        elif "embed_tokens" not in name:
            parameter.mul_(MATRIX_FACTOR)


def prompts(seed: int, lengths: Sequence[int] = (1, 30, 100)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def reference(path: Path) -> PreTrainedModel:
    """The checkpoint as transformers sees it, in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return model


def expected_logits(model: PreTrainedModel, prompt: Sequence[int], trace: Trace) -> Tensor:
    """Theirs of every token that came out, given all before it: float32 [tokens, V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([[*prompt, *trace.tokens]])).logits[0]
    return logits[len(prompt) - 1 : -1]


def assert_parity(path: Path, asked: Sequence[Sequence[int]]) -> list[Trace]:
    """Float32 weights and fp32 KV: logits within 1e-4 and the same text, which is not one token
    again and again."""
    traces = OneRank.load(path, "float32").generate(
        asked, max_tokens=NUM_TOKENS, kv_dtype="fp32", max_batched_tokens=48
    )
    model = reference(path)
    for prompt, trace in zip(asked, traces, strict=True):
        assert len(trace.tokens) == NUM_TOKENS
        expected = expected_logits(model, prompt, trace)
        torch.testing.assert_close(torch.stack(trace.logits), expected, rtol=0, atol=1e-4)
        assert expected.argmax(dim=-1).tolist() == trace.tokens
    assert len({token for trace in traces for token in trace.tokens}) >= 16
    return traces
