"""Matrices that a checkpoint stores as MXFP4: four-bit codes, a power of two for each 32 of them.

In place of `name` [.., rows, columns] the files hold, with a row's columns in order:
  `name`_blocks  uint8 [.., rows, columns/32, 16], element 2i in the low nibble of byte i
  `name`_scales  uint8 [.., rows, columns/32], exponent + 127
Every value has one bit of mantissa, so bfloat16 and float32 hold it exactly.
Neighbours: `moe_kernels.mxfp4` is the code (the KV cache uses it too), `weights` reads by this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_kernels.kv_formats import MXFP4_BLOCK
from moe_worker.model.spec import ModelUnreadable
from moe_worker.model.tensors import Raw, Shape

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, SCALES = "_blocks", "_scales"
_BYTES = frozenset(("U8",))
_NAN_SCALE = 255


@dataclass(frozen=True)
class Mxfp4:
    """The `Encoding` of such a matrix."""

    def raws(self, name: str, shape: Shape) -> tuple[Raw, ...]:
        """Raises ModelUnreadable when a row is not whole blocks."""
        *rows, columns = shape
        if columns % MXFP4_BLOCK:
            raise ModelUnreadable(
                f"{name}: rows of {columns} elements cannot be MXFP4, whose blocks have "
                f"{MXFP4_BLOCK}; is quantization_config that of this checkpoint?"
            )
        groups = (*rows, columns // MXFP4_BLOCK)
        return (
            Raw(name + BLOCKS, (*groups, MXFP4_BLOCK // 2), _BYTES),
            Raw(name + SCALES, groups, _BYTES),
        )

    def decode(self, raw: Mapping[str, Tensor]) -> Tensor:
        """Float32 [.., rows, columns]; raises ModelUnreadable when a scale is not a number."""
        from moe_kernels.mxfp4 import dequantize_mxfp4

        (blocks_name,) = (name for name in raw if name.endswith(BLOCKS))
        scales_name = blocks_name.removesuffix(BLOCKS) + SCALES
        scales = raw[scales_name]
        if bool((scales == _NAN_SCALE).any()):
            raise ModelUnreadable(
                f"tensor {scales_name} holds the scale {_NAN_SCALE}, which is not a number; "
                "the checkpoint is damaged"
            )
        return dequantize_mxfp4(raw[blocks_name].flatten(-2), scales)
