"""FP8 checkpoints of block-scaled matrices: E4M3 numbers, one float32 scale per block of 128×128.

A matrix `x.weight` comes with `x.weight_scale_inv`, which despite its name multiplies: the number
is e4m3 · scale of its block; the last blocks of rows and columns may be cut. It is decoded as it
is read and held in the model's dtype, so activations are not quantised.
Neighbours: `families.deepseek` says which matrices, `weights` calls `decode`. No torch but in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moe_worker.model.fields import Fields
from moe_worker.model.tensors import Pieces, Raw, Roles, Shape

if TYPE_CHECKING:
    from torch import Tensor

_SCALE_SUFFIX = "_scale_inv"


@dataclass(frozen=True)
class Fp8Blocks:
    """How matrices are stored, and which modules are left as plain floats."""

    block_rows: int = 128
    block_columns: int = 128
    plain_modules: frozenset[str] = frozenset()
    """Full names, or their last parts."""

    def raws(self, name: str, shape: Shape) -> tuple[Raw, ...]:
        rows, columns = shape
        blocks = -(-rows // self.block_rows), -(-columns // self.block_columns)
        return (
            Raw(name, shape, frozenset(("F8_E4M3",))),
            Raw(name + _SCALE_SUFFIX, blocks, frozenset(("F32",))),
        )

    def decode(self, raw: Mapping[str, Tensor]) -> Tensor:
        """Float32 [rows, columns], one row of blocks at a time: no second matrix of scales."""
        import torch

        name = next(name for name in raw if not name.endswith(_SCALE_SUFFIX))
        stored, scales = raw[name], raw[name + _SCALE_SUFFIX]
        decoded = torch.empty(stored.shape, dtype=torch.float32)
        for block, row_scales in enumerate(scales.repeat_interleave(self.block_columns, dim=1)):
            rows = slice(block * self.block_rows, (block + 1) * self.block_rows)
            torch.mul(
                stored[rows].to(torch.float32), row_scales[: stored.shape[1]], out=decoded[rows]
            )
        return decoded

    def applied(self, roles: Roles) -> Roles:
        """The same tensors, the matrices among them as this stores them."""
        return {role: tuple(self._apply(pieces)) for role, pieces in roles.items()}

    def _apply(self, pieces: Pieces) -> Pieces:
        return tuple(
            replace(piece, encoding=self)
            if len(piece.shape) == 2 and not self._is_plain(piece.name.removesuffix(".weight"))
            else piece
            for piece in pieces
        )

    def _is_plain(self, module: str) -> bool:
        return any(module == plain or module.endswith(f".{plain}") for plain in self.plain_modules)


def read_fp8_blocks(config: Fields) -> Fp8Blocks | None:
    """From `quantization_config`; None when its method is not fp8.

    Raises ModelUnreadable naming the field that asks for something else.
    """
    quantisation = config.object("quantization_config")
    if quantisation.get("quant_method") != "fp8":
        return None
    quantisation.only("fmt", "e4m3")
    block = quantisation.get("weight_block_size", [128, 128])
    if (
        not isinstance(block, list)
        or len(block) != 2
        or not all(isinstance(size, int) and size > 0 for size in block)
    ):
        raise quantisation.wrong("weight_block_size", "two positive integers", block)
    plain = quantisation.get("modules_to_not_convert", [])
    if not isinstance(plain, list) or not all(isinstance(name, str) for name in plain):
        raise quantisation.wrong("modules_to_not_convert", "a list of names", plain)
    return Fp8Blocks(block[0], block[1], frozenset(plain))
