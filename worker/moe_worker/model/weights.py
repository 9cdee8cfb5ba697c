"""A hub-layout safetensors checkpoint, read slice by slice through memory maps.

Only what is asked for is read: a rank loads the shared weights once and then the experts it holds,
one by one. Every tensor's name and shape is checked from the files' headers first, so a damaged
checkpoint is refused before anything is allocated.
Neighbours: `config` says what to expect; `moe_worker.expert.bank` keeps the experts;
`transformer` computes with the rest.

Letters: V vocabulary, H hidden, I expert intermediate, E experts, Q query rows, K key/value rows.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_worker.model.config import ModelArchitecture, ModelUnreadable

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_READABLE = frozenset(("F32", "BF16", "F16"))


@dataclass(frozen=True)
class LayerWeights:
    attention_norm_H: Tensor
    qkv_QH: Tensor
    """Rows of q, then k, then v: [(num_heads + 2·num_kv_heads)·head_dim, H]."""
    o_HQ: Tensor
    moe_norm_H: Tensor
    gate_EH: Tensor
    """Router weight."""


@dataclass(frozen=True)
class SharedWeights:
    """Everything that every rank holds: all but the experts."""

    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    lm_head_VH: Tensor

    @property
    def num_bytes(self) -> int:
        tensors = [self.embedding_VH, self.norm_H]
        if self.lm_head_VH is not self.embedding_VH:
            tensors.append(self.lm_head_VH)
        for layer in self.layers:
            tensors += [layer.attention_norm_H, layer.qkv_QH, layer.o_HQ, layer.moe_norm_H]
            tensors.append(layer.gate_EH)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class ExpertWeights:
    w13_2IH: Tensor
    """w1 (gate) in rows 0:I, w3 (up) in rows I:2I."""
    w2_HI: Tensor


class Checkpoint:
    """The tensors of `path`, in the dtype of `arch`. Opening it checks names and shapes."""

    def __init__(self, path: str | Path, arch: ModelArchitecture) -> None:
        self.path = Path(path)
        self.arch = arch
        self.dtype = TORCH_DTYPES[arch.dtype]
        self._expected = _expected_shapes(arch)
        self._file_of = _locate(self.path)
        self._files = {
            name: _open(self.path / name) for name in sorted(set(self._file_of.values()))
        }
        self._check()

    @property
    def bytes_per_expert(self) -> int:
        return self.arch.bytes_per_expert

    def load_shared(self, device: str | torch.device = "cpu") -> SharedWeights:
        """Embeddings, attention, norms, gates and the output head."""
        embedding = self._read("model.embed_tokens.weight", device)
        return SharedWeights(
            embedding_VH=embedding,
            layers=tuple(self._read_layer(layer, device) for layer in range(self.arch.num_layers)),
            norm_H=self._read("model.norm.weight", device),
            lm_head_VH=(
                embedding if self.arch.tie_embeddings else self._read("lm_head.weight", device)
            ),
        )

    def read_expert(
        self, layer: int, expert: int, device: str | torch.device = "cpu"
    ) -> ExpertWeights:
        """One expert of model layer `layer` (an element of `arch.moe_layers`)."""
        stem = _expert_stem(layer, expert)
        return ExpertWeights(
            w13_2IH=torch.cat(
                (
                    self._read(f"{stem}.w1.weight", device),
                    self._read(f"{stem}.w3.weight", device),
                )
            ),
            w2_HI=self._read(f"{stem}.w2.weight", device),
        )

    def _read_layer(self, layer: int, device: str | torch.device) -> LayerWeights:
        stem = f"model.layers.{layer}"
        qkv = [self._read(f"{stem}.self_attn.{name}_proj.weight", device) for name in "qkv"]
        return LayerWeights(
            attention_norm_H=self._read(f"{stem}.input_layernorm.weight", device),
            qkv_QH=torch.cat(qkv),
            o_HQ=self._read(f"{stem}.self_attn.o_proj.weight", device),
            moe_norm_H=self._read(f"{stem}.post_attention_layernorm.weight", device),
            gate_EH=self._read(f"{stem}.block_sparse_moe.gate.weight", device),
        )

    def _read(self, name: str, device: str | torch.device) -> Tensor:
        tensor: Tensor = self._files[self._file_of[name]].get_tensor(name)
        return tensor.to(device=device, dtype=self.dtype)

    def _check(self) -> None:
        for name, expected in self._expected.items():
            if name not in self._file_of:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} is missing; is the checkpoint complete and of "
                    "the layout its config.json names?"
                )
            file = self._files[self._file_of[name]]
            if name not in file.keys():
                raise ModelUnreadable(
                    f"{self.path}: the index places {name} in {self._file_of[name]}, "
                    "which does not hold it"
                )
            view = file.get_slice(name)
            found = tuple(view.get_shape())
            if found != expected:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} has shape {list(found)}, config.json asks for "
                    f"{list(expected)}"
                )
            if view.get_dtype() not in _READABLE:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} has dtype {view.get_dtype()}; readable: "
                    f"{', '.join(sorted(_READABLE))}"
                )


def _locate(path: Path) -> dict[str, str]:
    """Tensor name → file name, from the index or the only file."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelUnreadable(f"{index} holds no weight_map: {error!r}") from error
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single.name)
    raise ModelUnreadable(f"{path} holds neither {single.name} nor {index.name}")


def _open(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelUnreadable(f"cannot read {file}: {error}") from error


def _expert_stem(layer: int, expert: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}"


def _expected_shapes(arch: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    query_rows = arch.num_heads * arch.head_dim
    kv_rows = arch.num_kv_heads * arch.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (arch.vocab_size, arch.hidden),
        "model.norm.weight": (arch.hidden,),
    }
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, arch.hidden)
    for layer in range(arch.num_layers):
        stem = f"model.layers.{layer}"
        shapes[f"{stem}.input_layernorm.weight"] = (arch.hidden,)
        shapes[f"{stem}.post_attention_layernorm.weight"] = (arch.hidden,)
        shapes[f"{stem}.self_attn.q_proj.weight"] = (query_rows, arch.hidden)
        shapes[f"{stem}.self_attn.k_proj.weight"] = (kv_rows, arch.hidden)
        shapes[f"{stem}.self_attn.v_proj.weight"] = (kv_rows, arch.hidden)
        shapes[f"{stem}.self_attn.o_proj.weight"] = (arch.hidden, query_rows)
    for layer in arch.moe_layers:
        shapes[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = (
            arch.num_experts,
            arch.hidden,
        )
        for expert in range(arch.num_experts):
            stem = _expert_stem(layer, expert)
            shapes[f"{stem}.w1.weight"] = (arch.intermediate, arch.hidden)
            shapes[f"{stem}.w3.weight"] = (arch.intermediate, arch.hidden)
            shapes[f"{stem}.w2.weight"] = (arch.hidden, arch.intermediate)
    return shapes
