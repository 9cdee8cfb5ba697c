"""A model's own config.json as a `ModelSpec`, and what the worker tells of it. No torch.

Neighbours: `families` know the fields of each kind of model, `spec` is the result, `weights` reads
the tensors, `kv_layout` says what a token of its cache is. A model that cannot be served is refused
here, in words.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from moe_api.worker import KvConfig, ModelShape
from moe_kernels.router import UnfitRouter
from moe_worker.model.families.registry import find_family
from moe_worker.model.fields import Fields
from moe_worker.model.kv_layout import kv_bytes_per_token
from moe_worker.model.spec import (
    ModelHasNoExperts,
    ModelSpec,
    ModelUnreadable,
    shown,
)

__all__ = [
    "ModelHasNoExperts",
    "ModelSpec",
    "ModelUnreadable",
    "load_architecture",
    "parse_architecture",
    "shape",
]

_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def load_architecture(path: str | Path) -> ModelSpec:
    """Read `path`/config.json (hub layout), and generation_config.json for more end tokens.

    Raises ModelUnreadable or ModelHasNoExperts, naming the field and its value.
    """
    spec = parse_architecture(_read_object(Path(path) / "config.json"))
    generation_file = Path(path) / "generation_config.json"
    if not generation_file.is_file():
        return spec
    # Chat models name the end of a turn only there.
    more = Fields(_read_object(generation_file), generation_file.name).token_ids("eos_token_id")
    return replace(spec, eos_token_ids=spec.eos_token_ids | more)


def parse_architecture(config: dict[str, Any]) -> ModelSpec:
    """The pure part of `load_architecture`."""
    _refuse_without_experts(config)
    fields = Fields(config)
    family = find_family(fields)
    quantisation = fields.object("quantization_config")
    method = quantisation.get("quant_method")
    if not quantisation.is_empty and method not in family.quantisations:
        raise ModelUnreadable(
            f"quantization_config.quant_method {shown(method)} is not supported for "
            f"{family.architecture}; supported: {', '.join(family.quantisations) or 'none'}"
        )
    try:
        return family.describe(fields)
    except UnfitRouter as error:
        raise ModelUnreadable(str(error)) from error


def shape(arch: ModelSpec, kv: KvConfig) -> ModelShape:
    """What the worker reports of its model."""
    return ModelShape(
        layers=len(arch.moe_layers),
        experts=arch.num_experts,
        top_k=arch.top_k,
        expert_groups=None if arch.router.groups is None else arch.router.groups.num,
        bytes_per_expert=arch.bytes_per_expert,
        kv_bytes_per_token=kv_bytes_per_token(arch, kv),
    )


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelUnreadable(
            f"cannot read {file}: {error.strerror}; model.path must be a folder in the hub's layout"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{file} holds {type(content).__name__}, expected an object")
    return content


def _refuse_without_experts(config: dict[str, Any]) -> None:
    if not any(config.get(key) for key in _EXPERT_KEYS):
        raise ModelHasNoExperts(
            f"model_type {shown(config.get('model_type'))} has no experts (none of "
            f"{', '.join(_EXPERT_KEYS)} in config.json); serve a Mixture-of-Experts model"
        )
    for key in _EXPERT_KEYS:
        if config.get(key) == 1:
            raise ModelHasNoExperts(
                f"{key} is 1: every token goes to the one expert, there is nothing to place; "
                "serve a model with two or more"
            )
