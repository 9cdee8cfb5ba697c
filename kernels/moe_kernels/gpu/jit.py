"""How kernels are compiled and launched here; what an interpreter changes, it changes in this file.

Rules for a kernel:
* No contraction of a product and a sum (`enable_fp_fusion` off): FP4 bytes, rotations and merged
  softmax parts are the same bits whichever kernel computes them. Where one rounding is wanted, the
  tensor cores do it, or the formula says so.
* Division and root are `tl.div_rn` and `tl.sqrt_rn`; Triton's own `/` is an approximation.
* The shape of a tile, the number of warps and the order along the summed axis are functions of the
  weights' and pages' shapes, never of the batch: a row's bits do not know their neighbours.
* What changes from step to step (rows, tokens) is an argument that is not specialised, so that a
  step compiles nothing new; a model's own numbers are `tl.constexpr` or divide by 16 for all steps.
* Offsets that may pass 2³¹ elements are int64.

With TRITON_INTERPRET=1, set before triton is first imported, kernels run as numpy programs on CPU
tensors: for tests, thousands of times slower. `dot` is a plain sum of products there, because the
interpreter takes bfloat16 for whole numbers and numpy's products know a row's place. So that rows
of the tensor cores do not know theirs is tested on a GPU alone.
Neighbour: `numbers` are the conversions that all kernels share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

IS_INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERPRETED = tl.constexpr(IS_INTERPRETED)
SAFE: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch."""


def compiled(function: Callable[..., Any]) -> Any:
    """A function of the device, or a kernel all of whose numbers are a model's."""
    return triton.jit(function)


def compiled_for_any(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """A kernel whose arguments `names` change from step to step."""

    def make(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(names))

    return make


def blocks(total: int, size: int) -> int:
    """How many blocks of `size` hold `total`."""
    return -(-total // size)


def padded(size: int, least: int = 1) -> int:
    """The next power of two, as every side of a tile must be."""
    return max(least, 1 << (size - 1).bit_length())


@compiled
def dot(a: tl.tensor, b: tl.tensor, sums: tl.tensor) -> tl.tensor:
    """sums + a · b by the tensor cores, or by plain float32 multiplication where both are that."""
    if INTERPRETED:
        sums += tl.sum(a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :], 1)
    else:
        sums = tl.dot(a, b, sums, input_precision="ieee")
    return sums
