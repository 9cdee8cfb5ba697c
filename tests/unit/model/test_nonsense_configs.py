"""Whatever a config.json says, it is described or refused by name: quickly, in little memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GptOssConfig

from moe_api.worker import KvConfig
from moe_kernels.kv_formats import KvFormatError
from moe_worker.model import rope
from moe_worker.model.config import (
    ModelHasNoExperts,
    ModelSpec,
    ModelUnreadable,
    parse_architecture,
    shape,
)
from moe_worker.model.families.registry import FAMILIES, family_of
from tests.support import deepseek_models, family_models, gpt_oss_models

ROPE: dict[str, Any] = {
    "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0, "truncate": True,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
NONSENSE: tuple[Any, ...] = (
    -1, 0, 1, 3, 10**9, 10**30, 1.5, -0.5, math.nan, math.inf, 1e-300, 1e300, True, False, "", "x",
    "y" * 10**6, [], [1], [[]], [None], [True], ["x", 2], [0] * 10**5, {}, {"a": 1}, None,
)  # fmt: skip
MOST_CHARACTERS = 1000
"""Of a refusal: it ends in logs and in a status."""


def configs() -> dict[str, dict[str, Any]]:
    """What `transformers` writes for a small model of each family."""
    made = {
        name: of_family(**{**family_models.SIZES, **family_models.OWN[name]})
        for name, (of_family, _) in family_models.CLASSES.items()
    }
    for name, (of_family, _) in deepseek_models.CLASSES.items():
        own = {**deepseek_models.COMMON, **deepseek_models.OWN[name]}
        made[name] = of_family(**{**family_models.SIZES, **own})
    made["gpt_oss"] = GptOssConfig(**{**family_models.SIZES, **gpt_oss_models.OWN})
    classes = {family.model_type: family.architecture for family in FAMILIES}
    return {name: {**of.to_dict(), "architectures": [classes[name]]} for name, of in made.items()}


CONFIGS = configs()


def described(config: dict[str, Any]) -> ModelSpec | None:
    """The model, or None when it was refused; anything else that it raises is a fault."""
    refused = ""
    try:
        spec = parse_architecture(config)
        tensors = family_of(spec.family).tensors(spec)
        tensors.shared()
        roles = tensors.layers[spec.moe_layers[0]].expert
        assert roles is not None
        roles(0)
        shape(spec, KvConfig(dtype="fp32"))
    except (ModelUnreadable, ModelHasNoExperts, KvFormatError) as refusal:
        refused = str(refusal)
    assert len(refused) < MOST_CHARACTERS
    return None if refused else spec


def variants(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The config with one field at a time that says something else."""
    for key, value in config.items():
        for nonsense in NONSENSE:
            yield {**config, key: nonsense}
            if isinstance(value, dict):
                yield from ({**config, key: {**value, inner: nonsense}} for inner in value)


def test_all_families_are_tried() -> None:
    assert set(CONFIGS) == {family.model_type for family in FAMILIES}
    assert all(described(config) is not None for config in CONFIGS.values())


@pytest.mark.parametrize("family", CONFIGS)
def test_any_value_of_any_field_is_described_or_refused(family: str) -> None:
    for config in variants(CONFIGS[family]):
        described(config)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3"])
def test_positions_are_finite_or_refused(family: str, kind: str) -> None:
    config = {key: value for key, value in CONFIGS[family].items() if not key.startswith("rope")}
    for field in ROPE:
        for nonsense in NONSENSE:
            scaling = {**ROPE, "rope_type": kind, field: nonsense}
            spec = described({**config, "rope_parameters": scaling})
            if spec is not None:
                told = (field, nonsense, spec.rope)
                assert bool(torch.isfinite(rope.frequencies(spec.rope)).all()), told
                assert math.isfinite(rope.magnitude(spec.rope)), told
                assert math.isfinite(spec.attention.scale or 0.0), told


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize(
    "quantisation",
    [{"quant_method": "awq"}, {"load_in_4bit": True}, {"quant_method": ["fp8"]}, True, "fp8", [1]],
)
def test_a_quantisation_that_is_not_known_is_refused(family: str, quantisation: Any) -> None:
    with pytest.raises(ModelUnreadable, match="quantization_config"):
        parse_architecture({**CONFIGS[family], "quantization_config": quantisation})
