"""Which families there are, found by what config.json calls its model."""

from __future__ import annotations

from moe_worker.model.families import (
    deepseek_v2,
    deepseek_v3,
    gpt_oss,
    granite_moe,
    mixtral,
    olmoe,
    qwen2_moe,
    qwen3_moe,
)
from moe_worker.model.families.family import Family
from moe_worker.model.fields import Fields
from moe_worker.model.spec import ModelUnreadable, shown

FAMILIES: tuple[Family, ...] = (
    mixtral.FAMILY,
    qwen2_moe.FAMILY,
    qwen3_moe.FAMILY,
    olmoe.FAMILY,
    granite_moe.FAMILY,
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    gpt_oss.FAMILY,
)


def find_family(config: Fields) -> Family:
    """By `architectures[0]`, and by `model_type` where the config names no class.

    Raises ModelUnreadable naming both and what is supported.
    """
    model_type, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(classes, list | None) or (classes and not isinstance(classes[0], str)):
        raise config.wrong("architectures", "a list of names", classes)
    for family in FAMILIES:
        if classes and classes[0] == family.architecture:
            return family
        if not classes and model_type == family.model_type:
            return family
    named = f"architecture {shown(classes[0])}" if classes else "config.json without architectures"
    raise ModelUnreadable(
        f"{named} (model_type {shown(model_type)}) is not supported; supported: "
        f"{', '.join(family.architecture for family in FAMILIES)}"
    )


def family_of(spec_family: str) -> Family:
    """The family that described a model."""
    return next(family for family in FAMILIES if family.model_type == spec_family)
