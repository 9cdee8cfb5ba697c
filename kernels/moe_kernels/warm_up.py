"""Compile what a model will need before the first request does.

Kernels are compiled by the types of their arguments, not by shapes: one small call of each is
enough, and it takes the same path as a step. Implementations that compile nothing have nothing to
do here. What was compiled before, in this process or by way of the cache on disk, is only loaded.
Neighbours: `implementation` says whose kernels; the worker turns its model's description into
`Needs`, goes through the steps beside everything else that it has to do at its start, and tells how
far it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

import torch

from moe_kernels.activation import SILU, Activation, SwigluOai
from moe_kernels.implementation import chosen
from moe_kernels.kv_formats import KvFormat, KvShape


@dataclass(frozen=True)
class Shapes:
    """A model's widths, and how its attention differs from layer to layer."""

    hidden: int
    intermediate: int
    num_heads: int
    rotated_pairs: int
    kv_format: KvFormat
    kv_shape: KvShape
    block_size: int
    windows: frozenset[int | None] = frozenset({None})
    sinks: bool = False


@dataclass(frozen=True)
class Needs:
    """What a model's calls have in common, as far as it makes a kernel another one."""

    dtypes: frozenset[torch.dtype]
    """Of weights other than routers'."""
    act: Activation = SILU
    bias: bool = False
    """Whether experts have biases."""
    routers: frozenset[torch.dtype] = frozenset()
    """Of routers' weights, some families keep them in float32 beside the rest."""
    grouped_query: frozenset[torch.dtype] = frozenset()
    """Of the weights of grouped-query attention, where the model has it."""
    shapes: Shapes | None = None
    """Of implementations whose kernels are compiled for a model's widths; None = not known yet."""


_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32})
EVERY_NEED = (
    Needs(_DTYPES, routers=_DTYPES, grouped_query=_DTYPES),
    Needs(_DTYPES, SwigluOai(), bias=True, routers=_DTYPES),
)
"""Of all models that there are, together."""


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[], object]


Report = Callable[[int, int, str, float], None]
"""Steps done, steps in all, the name of the one that just ended and the seconds it took."""


def warm_up(needs: Needs, report: Report) -> float:
    """Compile or load everything for `needs`; the seconds it took."""
    begin = time.monotonic()
    steps = warm_up_steps(needs)
    for done, step in enumerate(steps, start=1):
        start = time.monotonic()
        step.run()
        report(done, len(steps), step.name, time.monotonic() - start)
    return time.monotonic() - begin


def warm_up_steps(needs: Needs) -> list[Step]:
    """Of the implementation in force, in the order in which they are best run; perhaps none."""
    module = f"moe_kernels.{chosen()}.warm_up"
    if find_spec(module) is None:
        return []
    steps: list[Step] = import_module(module).steps(needs)
    return steps
