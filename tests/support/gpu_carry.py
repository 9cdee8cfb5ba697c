"""Tests make CPU tensors; on a GPU their operands are carried there and results back.

So one test is the same for every implementation. Pages are carried as a whole and copied back, as
`append` writes into them. Where kernels are interpreted nothing is carried.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from moe_kernels.kv_pages import KvPages

OPERATIONS = {
    "linear": ["linear"],
    "grouped_gemm": ["expert_mlp"],
    "activation": ["gated"],
    "norm_rope": ["rms_norm", "rope"],
    "permute": ["sort_by_slot"],
    "kv_pages": ["append", "append_latent"],
    "paged_attention": ["paged_attention"],
    "sampling": ["sample"],
}


def carry_operands() -> None:
    """From now on, in this process. Before the first call: the switch keeps what it found."""
    for operation, functions in OPERATIONS.items():
        module = import_module(f"moe_kernels.gpu.{operation}")
        for name in functions:
            function = getattr(module, name)
            if not hasattr(function, "__wrapped__"):
                setattr(module, name, _carried(function))


def _carried(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        there = [_carry(arg) for arg in args]
        result = function(*there, **{name: _carry(value) for name, value in kwargs.items()})
        for here, carried in zip(args, there, strict=True):
            if isinstance(here, KvPages):
                for to, source in zip(here.tensors, carried.tensors, strict=True):
                    to.copy_(source)
        return _bring_back(result)

    return run


def _carry(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to("cuda")
    if isinstance(value, KvPages):
        parts = tuple(
            dataclasses.replace(
                part,
                data=part.data.to("cuda"),
                scales=_carry(part.scales),
                global_scales_Z=_carry(part.global_scales_Z),
            )
            for part in value.parts
        )
        return dataclasses.replace(
            value,
            parts=parts,
            key_center_ND=_carry(value.key_center_ND),
            key_channel_ND=_carry(value.key_channel_ND),
        )
    return value


def _bring_back(result: Any) -> Any:
    if isinstance(result, Tensor):
        return result.to("cpu")
    if isinstance(result, tuple):
        return tuple(_bring_back(each) for each in result)
    return result
