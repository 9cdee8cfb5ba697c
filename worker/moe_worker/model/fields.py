"""Reading fields of a config.json, each refused by name when it is not what it must be.

Neighbours: `families` ask for the fields they know; `config` gives them the parsed file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moe_worker.model.spec import ModelUnreadable, RopeSpec, shown

_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "llama3")
MOST = 2**31 - 1
"""Of a count; nothing of a model comes near it."""
LEAST_NUMBER, MOST_NUMBER = 1e-18, 1e12
"""What is made of them by a few products is still a number in float32."""


class Fields:
    """The object in config.json. A field that is null counts as absent, as in transformers."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values, self._where = values, where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    @property
    def is_empty(self) -> bool:
        return not self._values

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def positive(self, key: str, default: int | None = None, most: int = MOST) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.wrong(key, "a positive integer", value)
        if value > most:
            raise self.wrong(key, f"at most {most}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.wrong(key, "a positive number", value)
        if not LEAST_NUMBER <= value <= MOST_NUMBER:
            raise self.wrong(key, f"from {LEAST_NUMBER:g} to {MOST_NUMBER:g}", value)
        return float(value)

    def number_or_zero(self, key: str) -> float:
        """A positive number, or 0, which is the same as none."""
        return 0.0 if self.get(key, 0) == 0 else self.number(key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def layer_list(self, key: str, num_layers: int) -> frozenset[int]:
        """Indices of layers; absent = none."""
        value = self.get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(layer, int) and 0 <= layer < num_layers for layer in value
        ):
            raise self.wrong(key, f"a list of layers below {num_layers}", value)
        return frozenset(value)

    def only(self, key: str, wanted: Any) -> None:
        """Refuse any other value of a field that has one supported value and default."""
        value = self.get(key, wanted)
        if value != wanted:
            raise ModelUnreadable(f"{key} {shown(value)} is not supported; only {wanted!r}")

    def token_ids(self, key: str) -> frozenset[int]:
        value = self.get(key)
        if value is None:
            return frozenset()
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int for token in ids):
            raise self.wrong(key, "an id or a list of ids", value)
        return frozenset(ids)

    def object(self, *keys: str) -> Fields:
        """The first of these that is there, as fields of its own; empty when none is."""
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.wrong(key, "an object", value)
            return Fields(value, f"{self._where}: {key}")
        return Fields({}, self._where)

    def windows(self, num_layers: int, window: int | None) -> tuple[int | None, ...]:
        """Per layer, by `layer_types` where the config has them, else `window` everywhere."""
        types = self.get("layer_types")
        if types is None:
            types = ["sliding_attention" if window else "full_attention"] * num_layers
        known = ("sliding_attention", "full_attention")
        if (
            not isinstance(types, list)
            or len(types) != num_layers
            or any(kind not in known for kind in types)
        ):
            raise self.wrong("layer_types", f"{num_layers} of {', '.join(known)}", types)
        windows = tuple(window if kind == known[0] else None for kind in types)
        return windows if any(windows) else ()

    def rope(self, dim: int, max_positions: int, theta: float) -> RopeSpec:
        """Both spellings of the hub: rope_theta and rope_scaling, or rope_parameters with all.

        `theta` is the family's own default.
        """
        scaling = self.object("rope_parameters", "rope_scaling")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _ROPE_KINDS:
            raise ModelUnreadable(
                f"rope type {shown(kind)} is not supported; one of {', '.join(_ROPE_KINDS)}"
            )
        rotated = scaling.number("partial_rotary_factor", self.number("partial_rotary_factor", 1.0))
        base = (scaling if scaling.has("rope_theta") else self).number("rope_theta", theta)
        original = scaling.positive(
            "original_max_position_embeddings",
            self.positive("original_max_position_embeddings", max_positions),
        )
        if not 1 <= int(dim * rotated) <= dim:
            raise scaling.wrong("partial_rotary_factor", f"a part of {dim} elements", rotated)
        spec = RopeSpec(int(dim * rotated), base, kind, original_positions=original)
        if kind == "default":
            return spec
        values: dict[str, Any] = {}
        if kind == "yarn":
            values = {
                "factor": scaling.number("factor", max_positions / original),
                "mscale": scaling.number_or_zero("mscale"),
                "mscale_all_dim": scaling.number_or_zero("mscale_all_dim"),
                "beta_fast": scaling.number("beta_fast", 32.0),
                "beta_slow": scaling.number("beta_slow", 1.0),
                "truncate": scaling.flag("truncate", True),
            }
            if scaling.has("attention_factor"):
                values["magnitude"] = scaling.number("attention_factor")
        else:
            values["factor"] = scaling.number("factor")
        if kind == "llama3":
            values["low_freq_factor"] = scaling.number("low_freq_factor")
            values["high_freq_factor"] = scaling.number("high_freq_factor")
        if kind == "dynamic":
            values["original_positions"] = max_positions
        return RopeSpec(**{**vars(spec), **values})

    def wrong(self, key: str, wanted: str, value: Any) -> ModelUnreadable:
        return ModelUnreadable(f"{self._where}: {key} must be {wanted}, got {shown(value)}")
