"""The choice of copies on the CPU: one pass to count an expert's tokens, one to place them.

Neighbour: `moe_kernels.copies` is the contract.

Letters: T tokens, K choices a token, E logical experts, C copies of one expert at most.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numba import types
from torch import Tensor

from moe_kernels.copies import GOLDEN, POINT_BITS, Copies
from moe_kernels.cpu.jit import Array, compiled

_STEP = np.int64(GOLDEN)
_SHIFT, _MASK = np.int64(64 - POINT_BITS), np.int64((1 << POINT_BITS) - 1)


class CopyArrays(NamedTuple):
    physical_EC: Array
    edges_EC: Array
    start_E: Array


def place_choices(
    ids_TK: Tensor, copies: Copies, sent_E: Tensor, turn: int
) -> tuple[Tensor, Tensor, int]:
    arrays = copy_arrays(copies)
    ids = ids_TK.contiguous().numpy()
    physical_TK, chosen_E = np.empty_like(ids), np.zeros(len(arrays.start_E), np.int64)
    strangers = place(ids, arrays, sent_E.contiguous().numpy(), turn, physical_TK, chosen_E)
    return torch.from_numpy(physical_TK), torch.from_numpy(chosen_E), strangers


def copy_arrays(copies: Copies) -> CopyArrays:
    """As the kernel takes them."""
    return copies.derived.get("cpu", partial(_copy_arrays, copies))


def _copy_arrays(copies: Copies) -> CopyArrays:
    tensors = (copies.physical_EC, copies.edges_EC, copies.start_E)
    return CopyArrays(*(tensor.contiguous().numpy() for tensor in tensors))


_TABLE = types.Array(types.int64, 2, "C")
COPY_ARRAYS = types.NamedTuple([_TABLE, _TABLE, types.Array(types.int64, 1, "C")], CopyArrays)
"""Their type to kernels."""


@compiled
def place(
    ids_TK: Array,
    copies: CopyArrays,
    sent_E: Array,
    turn: int,
    physical_TK: Array,
    chosen_E: Array,
) -> int:
    """Fills the last two, `chosen_E` from zero; returns the number of strangers."""
    physical_EC, edges_EC, start_E = copies.physical_EC, copies.edges_EC, copies.start_E
    (num_tokens, top_k), (num_experts, num_copies) = ids_TK.shape, physical_EC.shape
    strangers = 0
    for token in range(num_tokens):
        for choice in range(top_k):
            expert = ids_TK[token, choice]
            if 0 <= expert < num_experts:
                chosen_E[expert] += 1
            elif expert != -1:
                strangers += 1
    earlier_E = np.zeros(num_experts, np.int64)
    for token in range(num_tokens):
        for choice in range(top_k):
            expert = ids_TK[token, choice]
            if not 0 <= expert < num_experts:
                physical_TK[token, choice] = -1
            elif num_copies == 1:
                physical_TK[token, choice] = physical_EC[expert, 0]
            else:
                n = sent_E[expert] + (earlier_E[expert] + turn) % chosen_E[expert]
                point = ((n * _STEP + start_E[expert]) >> _SHIFT) & _MASK
                copy = 0
                while point >= edges_EC[expert, copy]:
                    copy += 1
                physical_TK[token, choice] = physical_EC[expert, copy]
                earlier_E[expert] += 1
    return strangers
