"""A hub-layout safetensors checkpoint, read slice by slice through memory maps.

Only what is asked for is read: a rank loads the shared weights once and then the experts it holds,
one by one, of a fused tensor only that expert's slice. Name, shape and kind of every tensor are
checked from the files' headers first, so a damaged checkpoint is refused before anything is
allocated.
Neighbours: `tensors` says what lies where, `moe_worker.expert.bank` keeps the experts,
`transformer` computes with the rest.

Letters: V vocabulary, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_worker.model.families.registry import family_of
from moe_worker.model.spec import ModelSpec, ModelUnreadable
from moe_worker.model.tensors import LayerTensors, Pieces, Roles, Stored

TORCH_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class RouterWeights:
    gate_EH: Tensor
    logit_bias_E: Tensor | None = None
    selection_bias_E: Tensor | None = None


@dataclass(frozen=True)
class MlpWeights:
    """A dense gated network."""

    w13_2IH: Tensor
    w2_HI: Tensor
    gate_1H: Tensor | None = None
    """Of a shared expert that has one."""


@dataclass(frozen=True)
class LayerWeights:
    attention_norm_H: Tensor
    attention: Mapping[str, Tensor]
    """By role, see `tensors.LayerTensors`."""
    mlp_norm_H: Tensor
    router: RouterWeights | None
    """None in a dense layer, which has `dense` instead."""
    dense: MlpWeights | None
    shared: MlpWeights | None


@dataclass(frozen=True)
class SharedWeights:
    """Everything that every rank holds: all but the routed experts."""

    embedding_VH: Tensor
    layers: tuple[LayerWeights, ...]
    norm_H: Tensor
    lm_head_VH: Tensor

    @property
    def num_bytes(self) -> int:
        return sum({id(tensor): tensor.nbytes for tensor in _tensors_in(self)}.values())


@dataclass(frozen=True)
class ExpertWeights:
    w13_2IH: Tensor
    """w1 (gate) in rows 0:I, w3 (up) in rows I:2I."""
    w2_HI: Tensor
    b13_2I: Tensor | None = None
    """Both biases or none."""
    b2_H: Tensor | None = None


class Checkpoint:
    """The tensors of `path`, in the dtype of `arch`. Opening it checks names and shapes."""

    def __init__(self, path: str | Path, arch: ModelSpec) -> None:
        self.path = Path(path)
        self.arch = arch
        self.dtype = TORCH_DTYPES[arch.dtype]
        self._tensors = family_of(arch.family).tensors(arch)
        self._file_of = _locate(self.path)
        self._files = {
            name: _open(self.path / name) for name in sorted(set(self._file_of.values()))
        }
        self._names = {name: frozenset(file.keys()) for name, file in self._files.items()}
        self._counting = threading.Lock()
        self.bytes_read = 0
        """Of tensors, as the files have them, that were asked for until now."""
        self._check(self._tensors.shared())
        for layer in arch.moe_layers:
            for expert in range(arch.num_experts):
                roles = self._expert_roles(layer, expert)
                self._check(stored for pieces in roles.values() for stored in pieces)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum((self.path / name).stat().st_size for name in self._files)

    @property
    def bytes_per_expert(self) -> int:
        return self.arch.bytes_per_expert

    @property
    def shared_bytes(self) -> int:
        """What `load_shared` will take."""
        return sum(
            math.prod(stored.shape if stored.index is None else stored.shape[1:])
            * (4 if stored.float32 else self.dtype.itemsize)
            for stored in self._tensors.shared()
        )

    def load_shared(self, device: str | torch.device = "cpu") -> SharedWeights:
        """Embeddings, attention, norms, routers, dense layers, shared experts and the head."""
        tensors = self._tensors
        embedding = self._read(tensors.embedding, device)
        return SharedWeights(
            embedding_VH=embedding,
            layers=tuple(self._read_layer(layer, device) for layer in tensors.layers),
            norm_H=self._read(tensors.norm, device),
            lm_head_VH=(
                embedding if tensors.lm_head is None else self._read(tensors.lm_head, device)
            ),
        )

    def read_expert(
        self, layer: int, expert: int, device: str | torch.device = "cpu"
    ) -> ExpertWeights:
        """One expert of model layer `layer` (an element of `arch.moe_layers`)."""
        found = self._read_roles(self._expert_roles(layer, expert), device)
        return ExpertWeights(found["w13"], found["w2"], found.get("b13"), found.get("b2"))

    def _expert_roles(self, layer: int, expert: int) -> Roles:
        roles_of = self._tensors.layers[layer].expert
        assert roles_of is not None, "asked only of layers that have experts"
        return roles_of(expert)

    def _read_layer(self, layer: LayerTensors, device: str | torch.device) -> LayerWeights:
        router = self._read_roles(layer.router, device)
        return LayerWeights(
            attention_norm_H=self._read(layer.attention_norm, device),
            attention=self._read_roles(layer.attention, device),
            mlp_norm_H=self._read(layer.mlp_norm, device),
            router=(
                RouterWeights(
                    router["gate"], router.get("logit_bias"), router.get("selection_bias")
                )
                if router
                else None
            ),
            dense=_mlp(self._read_roles(layer.dense, device)),
            shared=_mlp(self._read_roles(layer.shared, device)),
        )

    def _read_roles(self, roles: Roles, device: str | torch.device) -> dict[str, Tensor]:
        return {role: self._read(pieces, device) for role, pieces in roles.items()}

    def _read(self, pieces: Pieces, device: str | torch.device) -> Tensor:
        read = [self._read_piece(stored, device) for stored in pieces]
        return read[0] if len(read) == 1 else torch.cat(read)

    def _read_piece(self, stored: Stored, device: str | torch.device) -> Tensor:
        raw: dict[str, Tensor] = {}
        for part in stored.raws():
            file = self._files[self._file_of[part.name]]
            if stored.index is None or not part.sliced:
                raw[part.name] = file.get_tensor(part.name)
            else:
                raw[part.name] = file.get_slice(part.name)[stored.index]
        with self._counting:
            self.bytes_read += sum(part.nbytes for part in raw.values())
        tensor = raw[stored.name] if stored.encoding is None else stored.encoding.decode(raw)
        if stored.transposed:
            tensor = tensor.transpose(-1, -2)
        if stored.interleaved:
            tensor = torch.cat((tensor[0::2], tensor[1::2]))
        dtype = torch.float32 if stored.float32 else self.dtype
        return tensor.to(device=device, dtype=dtype).contiguous()

    def _check(self, pieces: Iterable[Stored]) -> None:
        for raw in (raw for stored in pieces for raw in stored.raws()):
            name = raw.name
            if name not in self._file_of:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} is missing; is the checkpoint complete and of "
                    "the layout its config.json names?"
                )
            if name not in self._names[self._file_of[name]]:
                raise ModelUnreadable(
                    f"{self.path}: the index places {name} in {self._file_of[name]}, "
                    "which does not hold it"
                )
            view = self._files[self._file_of[name]].get_slice(name)
            found = tuple(view.get_shape())
            if found != raw.shape:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} has shape {list(found)}, config.json asks for "
                    f"{list(raw.shape)}"
                )
            if view.get_dtype() not in raw.dtypes:
                raise ModelUnreadable(
                    f"{self.path}: tensor {name} has dtype {view.get_dtype()}; readable: "
                    f"{', '.join(sorted(raw.dtypes))}"
                )


def _mlp(roles: Mapping[str, Tensor]) -> MlpWeights | None:
    return MlpWeights(roles["w13"], roles["w2"], roles.get("gate")) if roles else None


def _tensors_in(value: object) -> list[Tensor]:
    """Every tensor in a tree of dataclasses, tuples and mappings."""
    if isinstance(value, Tensor):
        return [value]
    parts: Iterable[object] = ()
    if isinstance(value, Mapping):
        parts = value.values()
    elif isinstance(value, tuple):
        parts = value
    elif is_dataclass(value):
        parts = (getattr(value, field.name) for field in fields(value))
    return [tensor for part in parts for tensor in _tensors_in(part)]


def _locate(path: Path) -> dict[str, str]:
    """Tensor name → file name, from the index or the only file."""
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelUnreadable(f"{index} holds no weight_map: {error!r}") from error
        _refuse_outside(index, set(files.values()))
        return files
    if single.is_file():
        return dict.fromkeys(_open(single).keys(), single.name)
    raise ModelUnreadable(f"{path} holds neither {single.name} nor {index.name}")


def _refuse_outside(index: Path, names: set[str]) -> None:
    """An index names files of its own folder; these may be links, as in the hub's cache."""
    for name in sorted(names):
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise ModelUnreadable(f"{index} names {name!r}, which is not below the model's folder")


def _open(file: Path) -> Any:
    if file.exists() and not file.is_file():
        raise ModelUnreadable(f"cannot read {file}: it is no regular file")
    try:
        return safe_open(str(file), framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelUnreadable(f"cannot read {file}: {error}") from error
