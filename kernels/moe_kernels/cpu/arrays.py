"""Torch tensors as the arrays that kernels take: the same memory, C-contiguous.

numpy knows no bfloat16, and numba no arithmetic for float16: they travel as uint16 and as int16,
and a kernel's type of argument says which it is.
Neighbours: `intrinsics` reads and widens them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_kernels.cpu.jit import Array
from moe_kernels.cpu.product import fill_slot

_CARRIERS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


class UnsupportedDtype(ValueError):
    """The kernels have no code for numbers of this type."""


def float32_array(x: Tensor) -> Array:
    if x.dtype != torch.float32:
        raise UnsupportedDtype(f"activations are {x.dtype}: must be float32")
    array: Array = x.contiguous().numpy()
    return array


def stored_array(w: Tensor) -> Array:
    """Numbers of float32, bfloat16 or float16; products with a matrix of them are made ready."""
    carrier = _CARRIERS.get(w.dtype)
    if carrier is None and w.dtype != torch.float32:
        raise UnsupportedDtype(f"weights are {w.dtype}: must be float32, bfloat16 or float16")
    whole = w.contiguous()
    array: Array = (whole if carrier is None else whole.view(carrier)).numpy()
    if array.ndim > 1:
        fill_slot(array.dtype)
    return array
