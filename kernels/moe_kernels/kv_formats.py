"""What a KV format keeps of a token: which codes, how many bytes, which scales. No torch.

A token's entry of a layer is made of *sides*: keys and values of every kv head, or for latent
attention (MLA) the latent and the rotated part, which have no heads. A format stores each side in
a *code*; sides with the same code and width lie together in one part of the page.

| format | keys | values | latent | rope |
|---|---|---|---|---|
| fp32, bf16, fp16, fp8 | the same code everywhere | | | |
| k8v4 | fp8 | nvfp4 | refused: no values of its own | |
| nvfp4, mxfp4 | the same code | | the same code | fp8 |

The rotated part is never stored below FP8: positions do not survive four bits.
Neighbours: `kv_pages` lays parts out and moves tokens, `fp4`, `mxfp4` and `fp8` are the codes,
`moe_worker.engine.kv` chooses a format and sizes the cache with `bytes_per_token`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

CodeName = Literal["fp32", "bf16", "fp16", "fp8", "nvfp4", "mxfp4"]
KvFormatName = Literal["fp32", "bf16", "fp16", "fp8", "k8v4", "nvfp4", "mxfp4"]
KV_FORMATS: tuple[KvFormatName, ...] = get_args(KvFormatName)
Encoding = Literal["Standard", "FourOverSix"]
Side = Literal["key", "value", "latent", "rope"]

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
_SCALED: frozenset[CodeName] = frozenset({"fp8", "nvfp4"})
_BYTES: dict[CodeName, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
_FP4_BLOCK: dict[CodeName, int] = {"nvfp4": NVFP4_BLOCK, "mxfp4": MXFP4_BLOCK}

FIXED_SCALES: dict[tuple[CodeName, Side], float] = {
    ("nvfp4", "key"): 2.0**-4,
    ("nvfp4", "value"): 2.0**-6,
    ("nvfp4", "latent"): 2.0**-4,
    ("fp8", "key"): 2.0**-1,
    ("fp8", "value"): 2.0**-3,
    ("fp8", "latent"): 2.0**-1,
    ("fp8", "rope"): 2.0**-1,
}
"""Global scales in decode direction, powers of two. NVFP4's keep its E4M3 block scales in range for
standard deviations from .001 to 30 (keys) and 10 (values). FP8 has no block scales: eight times
as much lets it reach at least as far as NVFP4 does (448 · 8 against 448 · 6)."""


class KvFormatError(ValueError):
    """A format and a model, or two options of a format, that do not go together."""


@dataclass(frozen=True)
class HeadsShape:
    """Keys and values of every kv head."""

    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentShape:
    """One compressed latent that stands for keys and values, and one rotated key part."""

    latent_dim: int
    rope_dim: int


KvShape = HeadsShape | LatentShape


@dataclass(frozen=True)
class KvPart:
    """Sides stored in the same code and width, `heads` vectors of `width` elements each."""

    sides: tuple[Side, ...]
    code: CodeName
    heads: int
    width: int

    @property
    def data_width(self) -> int:
        """Stored elements of a vector: numbers of a plain code, else bytes."""
        return self.width // 2 if self.code in _FP4_BLOCK else self.width

    @property
    def scale_width(self) -> int:
        """Scale bytes of a vector."""
        block = _FP4_BLOCK.get(self.code)
        return self.width // block if block else 0

    @property
    def bytes_per_token(self) -> int:
        vector = self.data_width * _BYTES.get(self.code, 1) + self.scale_width
        return len(self.sides) * self.heads * vector

    @property
    def fixed_scales(self) -> dict[Side, float]:
        """Of each side; empty when the code has no global scale."""
        if self.code not in _SCALED:
            return {}
        return {side: FIXED_SCALES[self.code, side] for side in self.sides}


@dataclass(frozen=True)
class KvFormat:
    name: KvFormatName
    encoding: Encoding = "Standard"
    """How NVFP4 chooses a block's scale; the reader does not need to know."""

    @property
    def is_quantised(self) -> bool:
        return self.name not in ("fp32", "bf16", "fp16")

    def parts(self, shape: KvShape) -> tuple[KvPart, ...]:
        """How a token of `shape` is stored.

        Raises:
            KvFormatError: the format cannot hold this shape, or has no use for the encoding.
        """
        if self.encoding == "FourOverSix" and self.name not in ("nvfp4", "k8v4"):
            raise KvFormatError(
                f"kvCache.encoding FourOverSix chooses scales of NVFP4 blocks, {self.name} has "
                "none; use dtype nvfp4 or k8v4, or encoding Standard"
            )
        if isinstance(shape, LatentShape):
            parts = self._latent_parts(shape)
        else:
            parts = self._heads_parts(shape)
        for part in parts:
            _check_width(part, self.name)
        return parts

    def bytes_per_token(self, shape: KvShape) -> int:
        """Of one layer, keys and values together; raises KvFormatError like `parts`."""
        return sum(part.bytes_per_token for part in self.parts(shape))

    def _heads_parts(self, shape: HeadsShape) -> tuple[KvPart, ...]:
        heads, dim = shape.kv_heads, shape.head_dim
        if self.name == "k8v4":
            return (
                KvPart(("key",), "fp8", heads, dim),
                KvPart(("value",), "nvfp4", heads, dim),
            )
        return (KvPart(("key", "value"), self.name, heads, dim),)

    def _latent_parts(self, shape: LatentShape) -> tuple[KvPart, ...]:
        if self.name == "k8v4":
            raise KvFormatError(
                "kvCache.dtype k8v4 stores keys and values apart, latent attention has one latent "
                "for both; use fp8 or nvfp4"
            )
        rope: CodeName = "fp8" if self.is_quantised else self.name
        return (
            KvPart(("latent",), self.name, 1, shape.latent_dim),
            KvPart(("rope",), rope, 1, shape.rope_dim),
        )


def _check_width(part: KvPart, name: KvFormatName) -> None:
    block = _FP4_BLOCK.get(part.code, 2 if part.code == "fp8" else 1)
    if part.width % block:
        what = "head_dim" if "key" in part.sides or "value" in part.sides else "/".join(part.sides)
        other = "nvfp4, bf16" if block == MXFP4_BLOCK and not part.width % NVFP4_BLOCK else "bf16"
        raise KvFormatError(
            f"kvCache.dtype {name} needs a {what} divisible by {block}, the model's is "
            f"{part.width}; use {other} or fp32"
        )
