"""What loading is going to take is known before: counted from headers, equal to what is held."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.family_models import CLASSES, save_family


@pytest.mark.parametrize("family", CLASSES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_weights_take_the_announced_bytes(tmp_path: Path, family: str, dtype: str) -> None:
    save_family(tmp_path, family)
    checkpoint = Checkpoint(tmp_path, load_architecture(tmp_path).held_in(dtype))
    announced = checkpoint.shared_bytes
    assert checkpoint.load_shared().num_bytes == announced
    layer = checkpoint.arch.moe_layers[0]
    expert = checkpoint.read_expert(layer, 0)
    parts = (expert.w13_2IH, expert.w2_HI, expert.b13_2I, expert.b2_H)
    held = sum(part.nbytes for part in parts if part is not None)
    assert held == checkpoint.bytes_per_expert
