"""What a model asks of the kernels, for compiling them before the worker is ready.

Neighbours: `moe_kernels.warm_up` does it; `model.spec` describes the model.
"""

from __future__ import annotations

import torch

from moe_kernels.warm_up import Needs
from moe_worker.model.spec import ModelSpec
from moe_worker.model.weights import TORCH_DTYPES


def kernel_needs(spec: ModelSpec) -> Needs:
    """float32 is among the dtypes of every model: some keep their router in it."""
    return Needs(
        dtypes=frozenset({TORCH_DTYPES[spec.dtype], torch.float32}),
        act=spec.expert.act,
        bias=spec.expert.bias,
    )
