"""Random Mixtral checkpoints in the hub's layout, with decisions far from ties.

Default initialisation makes gates of std 0.02, hence near-ties that any rounding flips; so gates
are multiplied by 40 and every other matrix by 4.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import MixtralConfig, MixtralForCausalLM

GATE_FACTOR = 40.0
MATRIX_FACTOR = 4.0


def save_random_mixtral(
    path: Path,
    *,
    seed: int = 0,
    top_k: int = 4,
    num_experts: int = 8,
    num_layers: int = 2,
    hidden: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 48,
    vocab_size: int = 256,
    max_positions: int = 1024,
    tie_embeddings: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
) -> Path:
    """Write config.json and safetensors to `path`; returns `path`."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        num_local_experts=num_experts,
        num_experts_per_tok=top_k,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        sliding_window=None,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                is_gate = name.endswith("gate.weight")
                parameter.mul_(GATE_FACTOR if is_gate else MATRIX_FACTOR)
    model.to(dtype).save_pretrained(path, max_shard_size=max_shard_size)
    return path


def load_with_transformers(path: Path) -> MixtralForCausalLM:
    """The same checkpoint as transformers sees it, float32, for parity."""
    return MixtralForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
