"""A random Mixtral checkpoint written straight to safetensors: no transformers, ready in a moment.

Gates are drawn wide so that choices are far from ties, and biased so that some experts run hot.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_random_checkpoint(
    path: Path,
    *,
    seed: int = 0,
    top_k: int = 2,
    num_experts: int = 8,
    num_layers: int = 2,
    hidden: int = 32,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 16,
    intermediate: int = 24,
    vocab_size: int = 96,
    dtype: torch.dtype = torch.float32,
) -> Path:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    wide = 2.0 / hidden**0.5
    tensors = {
        "model.embed_tokens.weight": draw(vocab_size, hidden, std=1.0),
        "model.norm.weight": torch.ones(hidden, dtype=dtype),
        "lm_head.weight": draw(vocab_size, hidden, std=wide),
    }
    for layer in range(num_layers):
        stem = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{stem}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
        rows = {"q": num_heads, "k": num_kv_heads, "v": num_kv_heads}
        for name, heads in rows.items():
            tensors[f"{stem}.self_attn.{name}_proj.weight"] = draw(
                heads * head_dim, hidden, std=wide
            )
        tensors[f"{stem}.self_attn.o_proj.weight"] = draw(hidden, num_heads * head_dim, std=wide)
        moe = f"{stem}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = draw(num_experts, hidden, std=1.0)
        for expert in range(num_experts):
            for name, shape in (
                ("w1", (intermediate, hidden)),
                ("w2", (hidden, intermediate)),
                ("w3", (intermediate, hidden)),
            ):
                tensors[f"{moe}.experts.{expert}.{name}.weight"] = draw(*shape, std=wide)
    config = {
        "model_type": "mixtral",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "num_local_experts": num_experts,
        "num_experts_per_tok": top_k,
        "max_position_embeddings": 1024,
        "dtype": str(dtype).removeprefix("torch."),
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path
