"""Writes and reads the model in the hub's Mixtral layout, and resumable training states.

Neighbours: `model` stacks the experts of a layer in one parameter; the hub names each expert.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tiny_moe_training.model import ModelConfig, TinyMoE
from tiny_moe_training.vocabulary import END_ID, save_tokenizer

TOP_LEVEL = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}


class UnreadableCheckpointError(ValueError):
    """A folder does not hold a checkpoint that this script wrote."""


def hub_tensors(model: TinyMoE) -> dict[str, torch.Tensor]:
    """The parameters in BF16 by the hub's names."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.state_dict().items():
        value = parameter.detach().to(torch.bfloat16)
        prefix, _, last = name.rpartition(".")
        if last in ("w1", "w2", "w3"):
            for expert, weight in enumerate(value):
                tensors[f"model.{prefix}.experts.{expert}.{last}.weight"] = weight.contiguous()
        else:
            tensors[TOP_LEVEL.get(name, f"model.{name}")] = value
    return tensors


def save_model(model: TinyMoE, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes weights, configuration and tokenizer; another reader never sees half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / "model.safetensors.partial"
    save_file(hub_tensors(model), partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "attention_dropout": 0.0,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
        "pad_token_id": END_ID,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **dataclasses.asdict(model.config),
    }
    _write_json(folder / "config.json", config)
    generation = {"bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)


def load_model(folder: Path) -> TinyMoE:
    """The model of a folder in FP32; BF16 values are kept exactly.

    Raises UnreadableCheckpointError if files or tensors are missing.
    """
    try:
        config_json = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
    except FileNotFoundError as error:
        raise UnreadableCheckpointError(
            f"{error.filename}: missing; train a model first or name its folder with --out"
        ) from error
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    model = TinyMoE(ModelConfig(**{name: config_json[name] for name in names}))
    state = {}
    for name in model.state_dict():
        prefix, _, last = name.rpartition(".")
        if last in ("w1", "w2", "w3"):
            stem = f"model.{prefix}.experts"
            experts = range(model.config.num_local_experts)
            state[name] = torch.stack([tensors[f"{stem}.{e}.{last}.weight"] for e in experts])
        else:
            state[name] = tensors[TOP_LEVEL.get(name, f"model.{name}")]
    model.load_state_dict({name: value.float() for name, value in state.items()})
    return model.eval()


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
