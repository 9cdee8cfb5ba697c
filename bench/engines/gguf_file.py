"""A Qwen3-MoE checkpoint as a GGUF file, the format of llama.cpp; norms and routers in FP32.

Neighbour: `llama_engine` reads it, and its logits are compared with transformers' own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

ARCHITECTURE, MODEL_TYPE = "qwen3moe", "qwen3_moe"
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}
_IN_FP32 = ("norm", "ffn_gate_inp")


class NotWritten(ValueError):
    """The checkpoint is none that can be written."""


def write(model: Path, path: Path) -> None:
    """Matrices in BF16.

    Raises:
        NotWritten: another family.
    """
    config = json.loads((model / "config.json").read_text())
    if config["model_type"] != MODEL_TYPE:
        raise NotWritten(f"GGUF is written for {MODEL_TYPE} only, this is {config['model_type']}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    _describe(writer, config)
    _add(writer, "token_embd.weight", tensors["model.embed_tokens.weight"])
    _add(writer, "output_norm.weight", tensors["model.norm.weight"])
    _add(writer, "output.weight", tensors["lm_head.weight"])
    for layer in range(config["num_hidden_layers"]):
        source, target = f"model.layers.{layer}", f"blk.{layer}"
        for name, given in _OF_LAYER.items():
            _add(writer, f"{target}.{given}.weight", tensors[f"{source}.{name}.weight"])
        for part in ("gate", "up", "down"):
            experts = [
                tensors[f"{source}.mlp.experts.{expert}.{part}_proj.weight"]
                for expert in range(num_experts(config))
            ]
            _add(writer, f"{target}.ffn_{part}_exps.weight", torch.stack(experts))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def num_experts(config: dict[str, Any]) -> int:
    return int(config.get("num_local_experts") or config["num_experts"])


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_expert_count(num_experts(config))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    array = tensor.to(torch.float32).numpy()
    if any(part in name for part in _IN_FP32):
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType.BF16
    writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
