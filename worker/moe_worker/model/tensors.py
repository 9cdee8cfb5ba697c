"""Where a model's weights lie in its checkpoint: our tensors by role, the files' by name and shape.

A family writes it, once, from its description; the reader first compares all of it with the files'
headers and then reads only what it is asked for. No torch.
Neighbours: `families` write it, `weights` reads by it, `attention` and `mlp` have the roles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
FLOATS = frozenset(("F32", "BF16", "F16"))


@dataclass(frozen=True)
class Raw:
    """A tensor as a file has it."""

    name: str
    shape: Shape
    dtypes: frozenset[str] = FLOATS
    """Readable ones, in the names of safetensors."""
    sliced: bool = True
    """Whether `Stored.index` picks an element of its first dimension."""


class Encoding(Protocol):
    """How a checkpoint stores numbers in something else than floats.

    A value without torch; `decode` may import it.
    """

    def raws(self, name: str, shape: Shape) -> tuple[Raw, ...]:
        """The files' tensors that stand for the float tensor `name` of `shape`."""
        ...

    def decode(self, raw: Mapping[str, Tensor]) -> Tensor:
        """The float tensor of what was read: by name, already sliced to the element wanted."""
        ...


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint, or one element of its first dimension, made ours.

    In this order: read (`index`), decode, transpose, sort rows.
    """

    name: str
    shape: Shape
    """Of the whole tensor, as config.json has it; an encoding says what the files hold instead."""
    index: int | None = None
    """Of fused experts: which of them."""
    transposed: bool = False
    """[inputs, outputs] on disk; ours are [outputs, inputs]."""
    interleaved: bool = False
    """Rows gate, up, gate, up, … on disk; ours are all gates, then all ups."""
    float32: bool = False
    """Kept in float32 whatever the weights are held in."""
    encoding: Encoding | None = None

    def raws(self) -> tuple[Raw, ...]:
        if self.encoding is None:
            return (Raw(self.name, self.shape),)
        return self.encoding.raws(self.name, self.shape)


Pieces = tuple[Stored, ...]
"""Our tensor is these, one after another along the first dimension."""
Roles = Mapping[str, Pieces]


@dataclass(frozen=True)
class LayerTensors:
    attention_norm: Pieces
    attention: Roles
    """Roles belong to the kind of attention; of grouped-query attention: qkv, o, and where the
    description asks for them qkv_bias, o_bias, q_norm, k_norm, sinks."""
    mlp_norm: Pieces
    dense: Roles = field(default_factory=dict)
    """Of a layer without experts: w13 (gate, then up), w2 (down)."""
    router: Roles = field(default_factory=dict)
    """Of a MoE layer: gate, and as described logit_bias, selection_bias."""
    shared: Roles = field(default_factory=dict)
    """Of the shared expert: w13, w2, and as described gate."""
    expert: Callable[[int], Roles] | None = None
    """Of a routed expert: w13, w2, and as described b13, b2."""


@dataclass(frozen=True)
class ModelTensors:
    embedding: Pieces
    norm: Pieces
    lm_head: Pieces | None
    """None = the embedding again."""
    layers: tuple[LayerTensors, ...]

    def shared(self) -> list[Stored]:
        """All but the routed experts."""
        pieces = [*self.embedding, *self.norm, *(self.lm_head or ())]
        for layer in self.layers:
            pieces += [*layer.attention_norm, *layer.mlp_norm]
            for roles in (layer.attention, layer.dense, layer.router, layer.shared):
                pieces += [stored for found in roles.values() for stored in found]
        return pieces


def stored(name: str, *shape: int, float32: bool = False) -> Pieces:
    """One plain tensor."""
    return (Stored(name, shape, float32=float32),)
