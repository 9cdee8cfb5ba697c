"""Random gpt-oss checkpoints in the hub's two layouts: floats, and experts as MXFP4.

The float twin of an MXFP4 checkpoint is made by the dequantisation of `transformers`, so that
reading four-bit experts is compared with theirs and not with our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support.family_models import SIZES, spread

WINDOW = 24
SINK_STD = 1.5
EMBEDDING_FACTOR, RESIDUAL_BIAS_FACTOR = 8.0, 0.2
"""Else what is added to every token alike drowns the tokens, and one comes out again and again."""
OWN: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 32, "num_key_value_heads": 2, "intermediate_size": 96,
    "num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": WINDOW,
    # Within reach of these sizes; the published 7 would never clamp.
    "swiglu_limit": 0.7,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64,
    },
}  # fmt: skip
MATRICES = ("gate_up_proj", "down_proj")
# Exponents whose matrices are about as large as the other random ones.
SCALE_BYTES = (121, 124)


def save_gpt_oss(
    path: Path, *, seed: int = 2, dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """Floats, as `transformers` writes them; returns `path`."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(**{**SIZES, **OWN, **changes}))
    spread(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, SINK_STD)
            elif name.endswith(("o_proj.bias", "down_proj_bias")):
                parameter.mul_(RESIDUAL_BIAS_FACTOR)
            elif name.endswith("embed_tokens.weight"):
                parameter.mul_(EMBEDDING_FACTOR)
    model.to(dtype).save_pretrained(path)
    return path


def save_mxfp4_twins(
    packed: Path, floats: Path, *, seed: int = 2, dtype: torch.dtype = torch.float32
) -> None:
    """The same model twice: experts of random four-bit codes and scales in `packed`, and what
    `transformers` makes of them in `floats`."""
    save_gpt_oss(floats, seed=seed, dtype=dtype)
    content = load_file(floats / "model.safetensors")
    config = json.loads((floats / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    twin: dict[str, Tensor] = {}
    for name, tensor in content.items():
        if not name.endswith(MATRICES):
            twin[name] = tensor
            continue
        num_experts, inputs, outputs = tensor.shape
        groups = (num_experts, outputs, inputs // 32)
        blocks = torch.randint(0, 256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(*SCALE_BYTES, groups, generator=generator, dtype=torch.uint8)
        twin[f"{name}_blocks"], twin[f"{name}_scales"] = blocks, scales
        content[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    save_file(content, floats / "model.safetensors", metadata={"format": "pt"})
    packed.mkdir()
    save_file(twin, packed / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (packed / "config.json").write_text(json.dumps(config))
