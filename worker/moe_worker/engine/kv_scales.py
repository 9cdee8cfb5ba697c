"""The file that replaces a KV format's fixed scales, layer by layer (`kvCache.scalesFile`).

    {"schema": 1, "layers": [{"layer": 0, "scales": {"key": 0.05, "value": 0.02},
                              "keyCenter": [[…], …], "keyChannel": [[…], …]}, …]}

`scales` are global scales in decode direction, for keys and values, or for latent and rope where
attention is latent; `keyCenter` and `keyChannel` are [kv heads][head_dim] and used when
`kvCache.keyScaling` says Center or Channel. Nothing is defaulted in silence: every layer is there,
all say as much, and what says something has an effect.
Neighbours: `kv` allocates with them, `moe_kernels.kv_pages` computes with them.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_api.document import Document, DocumentError, Part
from moe_api.worker import KvConfig
from moe_kernels.kv_formats import HeadsShape, Side
from moe_kernels.kv_pages import LayerScales
from moe_worker.model.kv_layout import kv_format, kv_shape
from moe_worker.model.spec import ModelSpec

MAX_FILE_BYTES = 64 << 20
Positive = Annotated[float, Field(ge=2.0**-100, le=2.0**100)]
Finite = Annotated[float, Field(ge=-(2.0**100), le=2.0**100)]


class KvScalesUnusable(ValueError):
    """The options of keys and scales, the file and the model do not go together."""


class LayerEntry(Part):
    layer: Annotated[int, Field(ge=0)]
    scales: dict[Literal["key", "value", "latent", "rope"], Positive] = Field(default_factory=dict)
    key_center: list[list[Finite]] | None = None
    key_channel: list[list[Positive]] | None = None


class KvScalesFile(Document):
    layers: list[LayerEntry]


def layer_scales(folder: str | Path, model: ModelSpec, kv: KvConfig) -> tuple[LayerScales, ...]:
    """What each layer's pages are allocated with; without a file the format's fixed scales.

    Raises:
        KvScalesUnusable: naming the field, the layer and the way out.
        KvFormatError: the format cannot hold the model's keys and values.
    """
    scaled_sides = [
        side for part in kv_format(model, kv).parts(kv_shape(model)) for side in part.fixed_scales
    ]
    _check_options(model, kv)
    if kv.scales_file is None:
        return (LayerScales(),) * model.num_layers
    entries = _by_layer(_read(Path(folder), kv.scales_file), model.num_layers, kv.scales_file)
    if kv.key_scaling == "None" and not any(entry.scales for entry in entries):
        raise KvScalesUnusable(
            f"{kv.scales_file} has no scales, and keyScaling None uses nothing else of it; "
            "leave kvCache.scalesFile out or set kvCache.keyScaling"
        )
    _check_sides(entries, scaled_sides, kv)
    return tuple(_scales_of(entry, model, kv) for entry in entries)


def _check_options(model: ModelSpec, kv: KvConfig) -> None:
    if kv.key_scaling == "None":
        return
    treatment = f"kvCache.keyScaling {kv.key_scaling}"
    if not kv_format(model, kv).is_quantised:
        raise KvScalesUnusable(
            f"{treatment} treats keys before they are quantised, dtype {kv.dtype} does not "
            "quantise; use keyScaling None, or fp8, k8v4, nvfp4 or mxfp4"
        )
    if not isinstance(kv_shape(model), HeadsShape):
        raise KvScalesUnusable(
            f"{treatment} treats keys apart from values, latent attention stores one latent for "
            "both; use keyScaling None"
        )
    if kv.scales_file is None:
        raise KvScalesUnusable(
            f"{treatment} needs kvCache.scalesFile: nothing is calibrated while serving"
        )


def _read(folder: Path, name: str) -> KvScalesFile:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise KvScalesUnusable(
            f"kvCache.scalesFile {name} must lie below the model's folder: a relative path without "
            ".."
        )
    file = folder / path
    try:
        size = file.stat().st_size
        if size > MAX_FILE_BYTES:
            raise KvScalesUnusable(f"{file} has {size} bytes, at most {MAX_FILE_BYTES} are read")
        return KvScalesFile.from_json(file.read_bytes())
    except OSError as error:
        raise KvScalesUnusable(
            f"cannot read {file}: {error.strerror}; kvCache.scalesFile is a path below the "
            "model's folder"
        ) from error
    except DocumentError as error:
        raise KvScalesUnusable(f"{file}: {error}") from error


def _by_layer(content: KvScalesFile, num_layers: int, name: str) -> list[LayerEntry]:
    """The entry of each layer, in order."""
    found: dict[int, LayerEntry] = {}
    for entry in content.layers:
        if entry.layer in found:
            raise KvScalesUnusable(f"{name} has layer {entry.layer} twice")
        if entry.layer >= num_layers:
            raise KvScalesUnusable(
                f"{name} has layer {entry.layer}, the model's are 0 to {num_layers - 1}"
            )
        found[entry.layer] = entry
    for layer in range(num_layers):
        if layer not in found:
            raise KvScalesUnusable(
                f"{name}: layer {layer} is missing; give all of the {num_layers} layers"
            )
    return [found[layer] for layer in range(num_layers)]


def _check_sides(entries: list[LayerEntry], scaled_sides: list[Side], kv: KvConfig) -> None:
    first = entries[0]
    for entry in entries:
        for side in entry.scales:
            if side not in scaled_sides:
                having = ", ".join(scaled_sides) or "none"
                raise KvScalesUnusable(
                    f"{kv.scales_file}: layer {entry.layer} has a scale of {side}, which would "
                    f"have no effect; dtype {kv.dtype} has scales of: {having}"
                )
        for one, other in ((entry, first), (first, entry)):
            for side in other.scales:
                if side not in one.scales:
                    raise KvScalesUnusable(
                        f"{kv.scales_file}: layer {one.layer} has no scale of {side}, layer "
                        f"{other.layer} has one; give it in all layers or in none"
                    )


def _scales_of(entry: LayerEntry, model: ModelSpec, kv: KvConfig) -> LayerScales:
    return LayerScales(
        of_side=dict(entry.scales),
        key_center_ND=(
            _per_channel(entry, "keyCenter", entry.key_center, model, kv)
            if kv.key_scaling == "Center"
            else None
        ),
        key_channel_ND=(
            _per_channel(entry, "keyChannel", entry.key_channel, model, kv)
            if kv.key_scaling == "Channel"
            else None
        ),
    )


def _per_channel(
    entry: LayerEntry, key: str, values: list[list[float]] | None, model: ModelSpec, kv: KvConfig
) -> Tensor:
    shape = kv_shape(model)
    assert isinstance(shape, HeadsShape), "checked with the options"
    if values is None:
        raise KvScalesUnusable(
            f"{kv.scales_file}: layer {entry.layer} has no {key}, which kvCache.keyScaling "
            f"{kv.key_scaling} needs"
        )
    lengths = {len(head) for head in values}
    if len(values) != shape.kv_heads or lengths != {shape.head_dim}:
        raise KvScalesUnusable(
            f"{kv.scales_file}: {key} of layer {entry.layer} is not {shape.kv_heads} kv heads of "
            f"{shape.head_dim} numbers"
        )
    return torch.tensor(values, dtype=torch.float32)
