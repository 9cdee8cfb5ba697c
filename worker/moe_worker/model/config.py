"""What a model's own config.json says, as one frozen object. No torch.

Neighbours: `weights` reads the tensors this object describes, `transformer` computes with them,
`kv` sizes the cache from it. A model that cannot be served is refused here, in words.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from moe_api.worker import KvConfig, ModelShape

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
KV_DTYPE_OF: dict[DtypeName, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
SUPPORTED_MODEL_TYPES = ("mixtral",)
_EXPERT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


class ModelUnreadable(ValueError):
    """The model's files are missing, damaged or of a kind this worker cannot serve."""

    reason = "ModelUnreadable"


class ModelHasNoExperts(ValueError):
    """The model is readable but dense: there is nothing to place."""

    reason = "ModelHasNoExperts"


@dataclass(frozen=True)
class RouterSpec:
    """How gate logits become choices and weights."""

    score: Literal["softmax"] = "softmax"
    renorm: bool = True
    """Divide the chosen weights by their sum."""


@dataclass(frozen=True)
class ModelArchitecture:
    num_layers: int
    moe_layers: tuple[int, ...]
    """Indices of the layers that have experts."""
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    """Rows of one expert's w1."""
    num_experts: int
    top_k: int
    vocab_size: int
    rope_theta: float
    rms_eps: float
    max_positions: int
    tie_embeddings: bool
    dtype: DtypeName
    """Weights are held in this dtype; the checkpoint's own unless `held_in` says otherwise."""
    eos_token_ids: frozenset[int]
    router: RouterSpec = RouterSpec()

    def held_in(self, dtype: str) -> ModelArchitecture:
        """The same model with weights in another dtype; "auto" keeps the checkpoint's."""
        return self if dtype == "auto" else replace(self, dtype=_dtype_name(dtype, "dtype"))

    @property
    def bytes_per_expert(self) -> int:
        return 3 * self.intermediate * self.hidden * DTYPE_BYTES[self.dtype]


def load_architecture(path: str | Path) -> ModelArchitecture:
    """Read `path`/config.json (hub layout), and generation_config.json for more end tokens.

    Raises ModelUnreadable or ModelHasNoExperts, naming the field and its value.
    """
    architecture = parse_architecture(_read_object(Path(path) / "config.json"))
    generation_file = Path(path) / "generation_config.json"
    if not generation_file.is_file():
        return architecture
    # Chat models name the end of a turn only there.
    more = _token_ids(_read_object(generation_file).get("eos_token_id"))
    return replace(architecture, eos_token_ids=architecture.eos_token_ids | more)


def parse_architecture(config: dict[str, Any]) -> ModelArchitecture:
    """The pure part of `load_architecture`."""
    model_type = config.get("model_type")
    if not any(config.get(key) for key in _EXPERT_KEYS):
        raise ModelHasNoExperts(
            f"model_type {model_type!r} has no experts (none of {', '.join(_EXPERT_KEYS)} in "
            "config.json); serve a Mixture-of-Experts model"
        )
    for key in _EXPERT_KEYS:
        if config.get(key) == 1:
            raise ModelHasNoExperts(
                f"{key} is 1: every token goes to the one expert, there is nothing to place; "
                "serve a model with two or more"
            )
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ModelUnreadable(
            f"model_type {model_type!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    hidden, num_heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    architecture = ModelArchitecture(
        num_layers=_positive(config, "num_hidden_layers"),
        moe_layers=tuple(range(_positive(config, "num_hidden_layers"))),
        hidden=hidden,
        num_heads=num_heads,
        num_kv_heads=_positive(config, "num_key_value_heads", num_heads),
        head_dim=_positive(config, "head_dim", max(1, hidden // num_heads)),
        intermediate=_positive(config, "intermediate_size"),
        num_experts=_positive(config, "num_local_experts"),
        top_k=_positive(config, "num_experts_per_tok", 2),
        vocab_size=_positive(config, "vocab_size"),
        rope_theta=_rope_theta(config),
        rms_eps=_number(config, "rms_norm_eps", 1e-5),
        max_positions=_max_positions(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        dtype=_dtype_name(config.get("dtype") or config.get("torch_dtype") or "float32", "dtype"),
        eos_token_ids=_token_ids(config.get("eos_token_id")),
    )
    _check(architecture, config)
    return architecture


def shape(arch: ModelArchitecture, kv: KvConfig) -> ModelShape:
    """What the worker reports of its model."""
    return ModelShape(
        layers=len(arch.moe_layers),
        experts=arch.num_experts,
        top_k=arch.top_k,
        bytes_per_expert=arch.bytes_per_expert,
        kv_bytes_per_token=kv_bytes_per_token(arch, kv),
    )


def kv_dtype(arch: ModelArchitecture, kv: KvConfig) -> str:
    """The cache format in force; "auto" is the model's dtype."""
    return KV_DTYPE_OF[arch.dtype] if kv.dtype == "auto" else kv.dtype


def kv_bytes_per_token(arch: ModelArchitecture, kv: KvConfig) -> int:
    """All layers, keys and values. NVFP4: half a byte an element and a scale byte per 16."""
    elements = arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim
    if kv_dtype(arch, kv) == "nvfp4":
        return elements // 2 + elements // 16
    return elements * (4 if kv_dtype(arch, kv) == "fp32" else 2)


def _read_object(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelUnreadable(
            f"cannot read {file}: {error.strerror}; model.path must be a folder in the hub's layout"
        ) from error
    except ValueError as error:
        raise ModelUnreadable(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{file} holds {type(content).__name__}, expected an object")
    return content


def _check(arch: ModelArchitecture, config: dict[str, Any]) -> None:
    if arch.top_k > arch.num_experts:
        raise ModelUnreadable(
            f"num_experts_per_tok is {arch.top_k} but num_local_experts is {arch.num_experts}"
        )
    if arch.num_heads % arch.num_kv_heads:
        raise ModelUnreadable(
            f"num_attention_heads {arch.num_heads} is not a multiple of num_key_value_heads "
            f"{arch.num_kv_heads}"
        )
    if arch.head_dim % 2:
        raise ModelUnreadable(f"head_dim {arch.head_dim} is odd; rotary positions need pairs")
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnreadable(f"hidden_act {config['hidden_act']!r} is not supported; only 'silu'")


def _positive(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelUnreadable(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelUnreadable(f"config.json: {key} must be a positive number, got {value!r}")
    return float(value)


def _rope_theta(config: dict[str, Any]) -> float:
    """Both spellings of the hub: rope_theta, or rope_parameters with its kind."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ModelUnreadable(f"rope type {kind!r} is not supported; only 'default'")
    source = rope if rope.get("rope_theta") is not None else config
    return _number(source, "rope_theta", 1e6)


def _max_positions(config: dict[str, Any]) -> int:
    """Within its sliding window a model's attention is plain, so the window bounds the length."""
    positions = _positive(config, "max_position_embeddings", 4096 * 32)
    window = config.get("sliding_window")
    return positions if window is None else min(positions, _positive(config, "sliding_window"))


def _dtype_name(value: Any, key: str) -> DtypeName:
    for name in DTYPE_BYTES:
        if value == name:
            return name
    raise ModelUnreadable(
        f"config.json: {key} {value!r} is not supported; one of {', '.join(DTYPE_BYTES)}"
    )


def _token_ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelUnreadable(f"eos_token_id must be an id or a list of ids, got {value!r}")
    return frozenset(ids)
