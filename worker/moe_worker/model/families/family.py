"""What a family has to say; `moe_worker.model.config` and `weights` ask it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from moe_worker.model.fields import Fields
from moe_worker.model.spec import ModelSpec
from moe_worker.model.tensors import ModelTensors


@dataclass(frozen=True)
class Family:
    model_type: str
    architecture: str
    """The class that config.json names."""
    describe: Callable[[Fields], ModelSpec]
    """Raises ModelUnreadable for what this family cannot be, naming the field."""
    tensors: Callable[[ModelSpec], ModelTensors]
    quantisations: tuple[str, ...] = ()
    """`quantization_config.quant_method` that it can read."""
