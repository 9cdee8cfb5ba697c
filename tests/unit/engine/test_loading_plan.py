"""What a rank will allocate is counted before, and a model's wide promises cost nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_api.worker import WorkerConfig
from moe_placement.initial import contiguous
from moe_worker.engine.kernel_needs import kernel_needs
from moe_worker.engine.kv_size import KvDoesNotFit
from moe_worker.engine.loading import Loader
from moe_worker.engine.observer import Unobserved
from moe_worker.engine.settings import EngineSettings
from moe_worker.engine.warm_up import WarmUp
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support.models import save_random_mixtral

GIB = 1 << 30
MOST_POSITIONS = 2**31 - 1


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says it was trained for more positions than any memory holds the angles of."""
    path = save_random_mixtral(tmp_path_factory.mktemp("model"))
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = MOST_POSITIONS
    (path / "config.json").write_text(json.dumps(config))
    return path


def loader(path: Path, memory_bytes: int = GIB, **model: Any) -> Loader:
    config = WorkerConfig.model_validate(
        {"schema": 1, "model": {"path": str(path), "servedName": "m", **model},
         "kv": {"memoryFraction": 0.9}}
    )  # fmt: skip
    settings = EngineSettings(
        config, member=0, incarnation="i", token="t", memory_bytes=memory_bytes
    )
    arch = load_architecture(path)
    warm_up = WarmUp(kernel_needs(arch), Unobserved())
    warm_up.start()
    return Loader(settings, arch, Checkpoint(path, arch), warm_up)


def test_angles_are_made_for_the_lengths_that_are_served(wide: Path) -> None:
    wide_loader = loader(wide, maxModelLen=100)
    arch = wide_loader.arch
    slots = contiguous(len(arch.moe_layers), arch.num_experts, 1, arch.num_experts)
    loaded = wide_loader.load(slots)
    assert loaded.max_model_len == 100
    assert loaded.runner.transformer.max_positions == 100


def test_a_length_that_no_memory_holds_is_served_as_far_as_it_fits(wide: Path) -> None:
    narrow, roomy = (
        loader(wide, memory_bytes).memory_plan(2, 1, 8) for memory_bytes in (GIB, 2 * GIB)
    )
    assert 1000 < narrow.max_model_len < roomy.max_model_len < MOST_POSITIONS
    with pytest.raises(KvDoesNotFit, match=f"attention over {MOST_POSITIONS} tokens"):
        loader(wide, maxModelLen=MOST_POSITIONS).memory_plan(2, 1, 8)
