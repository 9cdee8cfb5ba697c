"""Random DeepSeek checkpoints made by `transformers`, and the same ones stored in FP8 blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
)

from tests.support.family_models import SIZES, spread

SELECTION_BIAS_STD = 0.3
COMMON: dict[str, Any] = {
    "intermediate_size": 72, "moe_intermediate_size": 40, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16, "v_head_dim": 20, "n_group": 4, "topk_group": 2,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0, "n_shared_experts": 2,
    },
    "deepseek_v3": {"n_shared_experts": 1, "num_mtp_layers": 0},
}  # fmt: skip
CLASSES: dict[str, tuple[type, type]] = {
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}


def save_deepseek(
    path: Path,
    family: str,
    *,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write a random model of the family, with `changes` to its config; returns `path`."""
    config_class, model_class = CLASSES[family]
    config = config_class(**{**SIZES, **COMMON, **OWN[family], **changes})
    torch.manual_seed(seed)
    model = model_class(config)
    spread(model)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, SELECTION_BIAS_STD)
    model.to(dtype).save_pretrained(path)
    return path


FP8_MAX = 448.0
FP8_BLOCK = 128
FP8_MODULES = ("_proj.weight", "_proj_with_mqa.weight")


def save_fp8_and_twin(plain: Path, fp8: Path, twin: Path) -> None:
    """Two copies of a checkpoint: its projections in FP8 blocks, and what these decode to.

    Both keep the dtype of the rest; the twin is rounded to it.
    """
    tensors = load_file(plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    decoded = dict(tensors)
    for name, matrix in list(tensors.items()):
        if name.endswith(FP8_MODULES):
            tensors[name], scales = to_fp8_blocks(matrix.float())
            tensors[f"{name}_scale_inv"] = scales
            decoded[name] = from_fp8_blocks(tensors[name], scales).to(matrix.dtype)
    method = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
              "weight_block_size": [FP8_BLOCK, FP8_BLOCK]}  # fmt: skip
    _write(fp8, {**config, "quantization_config": method}, tensors)
    _write(twin, config, decoded)


def to_fp8_blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [rows, columns] and float32 scales [blocks of rows, blocks of columns]."""
    rows, columns = matrix.shape
    blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    scales = torch.empty(blocks)
    stored = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for row in range(blocks[0]):
        for column in range(blocks[1]):
            at = (slice(row * FP8_BLOCK, (row + 1) * FP8_BLOCK),
                  slice(column * FP8_BLOCK, (column + 1) * FP8_BLOCK))  # fmt: skip
            scales[row, column] = matrix[at].abs().max() / FP8_MAX
            stored[at] = (matrix[at] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def from_fp8_blocks(stored: Tensor, scales: Tensor) -> Tensor:
    rows, columns = stored.shape
    every = torch.kron(scales, torch.ones(FP8_BLOCK, FP8_BLOCK))[:rows, :columns]
    return stored.float() * every


def _write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
