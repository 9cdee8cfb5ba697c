"""The model that is compared on: a random Qwen3-MoE of 111 M parameters, made in a moment.

Its safetensors are written directly, without transformers, so that ours alone can be measured too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "intermediate_size": 256,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "router_aux_loss_coef": 0.001,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
SPREAD = 0.02
"""Standard deviation of weights, as models are initialised."""


def write(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """The checkpoint's folder; `changes` of the configuration."""
    config = CONFIG | changes
    write_config(folder, config)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (torch.randn(shape, generator=generator) * SPREAD).to(torch.bfloat16)
        if len(shape) > 1
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes(config).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_config(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return folder


def shapes(config: dict[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """Of every tensor."""
    hidden, head, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate": (experts, hidden),
        }
        for expert in range(experts):
            of_layer |= {
                f"mlp.experts.{expert}.gate_proj": (width, hidden),
                f"mlp.experts.{expert}.up_proj": (width, hidden),
                f"mlp.experts.{expert}.down_proj": (hidden, width),
            }
        found |= {f"model.layers.{layer}.{name}.weight": of for name, of in of_layer.items()}
    return found
