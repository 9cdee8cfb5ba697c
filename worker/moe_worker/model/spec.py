"""What a model is, as frozen values: the one description that all families share. No torch.

A family turns its config.json into a `ModelSpec`; nothing below that line knows families.
Neighbours: `families` write it, `tensors` says where its weights lie, `attention` and `transformer`
compute it, `moe_worker.expert` reads its router and its experts, `engine.kv` sizes the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moe_kernels.activation import Activation, Silu
from moe_kernels.router import RouterSpec
from moe_worker.model.tensors import Encoding

DtypeName = Literal["float32", "bfloat16", "float16"]
SHOWN_CHARACTERS = 200
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelUnreadable(ValueError):
    """The model's files are missing, damaged or of a kind this worker cannot serve."""

    reason = "ModelUnreadable"


class ModelHasNoExperts(ValueError):
    """The model is readable but dense: there is nothing to place."""

    reason = "ModelHasNoExperts"


def shown(value: object) -> str:
    """A value of the file as messages have it: they end in logs and in a status."""
    text = repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"


@dataclass(frozen=True)
class RopeSpec:
    """Rotary positions; `rope` has the formulas. The fields after `theta` belong to one kind."""

    dim: int
    """Elements of a head that are rotated, the first ones."""
    theta: float
    kind: Literal["default", "linear", "dynamic", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_positions: int = 0
    """Positions the model was first trained for: dynamic, yarn and llama3."""
    magnitude: float | None = None
    """yarn: multiplies cos and sin; absent = derived from the factor and the two below."""
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self) -> None:
        if self.kind == "yarn" and self.theta <= 1:
            raise ModelUnreadable(f"rope_theta {self.theta:g}: yarn needs more than 1")
        if self.kind == "dynamic" and self.dim <= 2:
            raise ModelUnreadable(f"head_dim {self.dim}: dynamic rotary positions need more than 2")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ModelUnreadable(
                f"low_freq_factor {self.low_freq_factor:g} is not below high_freq_factor "
                f"{self.high_freq_factor:g}"
            )


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention; multi-head is the case of as many kv heads as heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    """Multiplies q · k; absent = 1/√head_dim."""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """RMS norm of queries and keys before rotation: of each head or of the whole projection."""
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    """Queries, keys and values are clipped to ± this, after the norm."""
    windows: tuple[int | None, ...] = ()
    """Per layer, how many tokens back a query sees, itself included; None = all. Empty = all."""
    sinks: bool = False
    """A learned logit per head takes part in the softmax and has no value."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelUnreadable(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads "
                f"{self.num_kv_heads}"
            )

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def kv_elements(self) -> int:
        """Elements that a layer's cache holds of one token."""
        return 2 * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention: a token's cache is one latent vector and one rotated key."""

    num_heads: int
    query_rank: int | None
    """Low-rank bottleneck of the queries; None = a plain projection."""
    latent_dim: int
    nope_dim: int
    """Elements of a head's query and key that are not rotated."""
    rope_dim: int
    value_dim: int
    scale: float
    """Multiplies q · k, with YaRN's correction in it."""
    bias: bool = False
    """Of the projections from and to the hidden states, but not of a plain query projection."""
    rope_interleaved: bool = True
    """Rotated pairs are neighbours, in rows of the query and the latent projection."""

    def window(self, layer: int) -> int | None:
        return None

    @property
    def kv_elements(self) -> int:
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True)
class ExpertSpec:
    """One routed expert: down · (act(gate · x) ∘ up · x)."""

    intermediate: int
    """Rows of the gate projection, and of the up projection."""
    act: Activation = field(default_factory=Silu)
    bias: bool = False
    """Both products have one."""

    def num_elements(self, hidden: int) -> int:
        weights = 3 * self.intermediate * hidden
        return weights + (2 * self.intermediate + hidden if self.bias else 0)


@dataclass(frozen=True)
class SharedExpertSpec:
    """The dense expert that every token of a MoE layer uses besides its routed ones."""

    intermediate: int
    gated: bool = False
    """Its output is multiplied by the sigmoid of a gate of its own."""


@dataclass(frozen=True)
class Multipliers:
    embedding: float = 1.0
    residual: float = 1.0
    """Of what attention and experts add to the residual stream."""
    logits: float = 1.0
    """Logits are divided by it."""


@dataclass(frozen=True)
class ModelSpec:
    family: str
    """Its name in `families.registry`."""
    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers that have experts; the others are dense."""
    hidden: int
    vocab_size: int
    max_positions: int
    rms_eps: float
    tie_embeddings: bool
    dtype: DtypeName
    """Weights are held in this dtype; the checkpoint's own unless `held_in` says otherwise."""
    eos_token_ids: frozenset[int]
    attention: AttentionSpec | LatentSpec
    rope: RopeSpec
    router: RouterSpec
    expert: ExpertSpec
    shared_expert: SharedExpertSpec | None = None
    dense_intermediate: int = 0
    """Rows of the gate projection in layers without experts."""
    multipliers: Multipliers = Multipliers()
    encoding: Encoding | None = None
    """How the checkpoint stores the matrices that it does not store as floats."""

    def __post_init__(self) -> None:
        if self.rope.dim % 2:
            raise ModelUnreadable(
                f"head_dim {self.rope.dim} is odd; rotary positions need pairs of elements"
            )
        if not self.moe_layers:
            raise ModelHasNoExperts(
                f"none of the {self.num_layers} layers has experts; serve a model with some"
            )

    def held_in(self, dtype: str) -> ModelSpec:
        """The same model with weights in another dtype; "auto" keeps the checkpoint's."""
        return self if dtype == "auto" else replace(self, dtype=dtype_name(dtype))

    @property
    def num_experts(self) -> int:
        return self.router.num_experts

    @property
    def top_k(self) -> int:
        return self.router.top_k

    @property
    def bytes_per_expert(self) -> int:
        return self.expert.num_elements(self.hidden) * DTYPE_BYTES[self.dtype]

    @property
    def grouped_query(self) -> AttentionSpec:
        """The attention of a model that has no latent cache."""
        assert isinstance(self.attention, AttentionSpec), "asked only where the kind is known"
        return self.attention


def dtype_name(value: object) -> DtypeName:
    for name in DTYPE_BYTES:
        if value == name:
            return name
    raise ModelUnreadable(
        f"config.json: dtype {shown(value)} is not supported; one of {', '.join(DTYPE_BYTES)}"
    )
