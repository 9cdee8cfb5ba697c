"""gpt-oss with its experts on two ranks, bit by bit what one rank gives.

Its experts come as MXFP4 from the checkpoint and travel between ranks with their biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_placement.initial import contiguous
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support import engine_ranks, worker_processes
from tests.support.gpt_oss_models import WINDOW, save_mxfp4_twins
from tests.support.serving_group import (
    ServingGroup,
    assert_same,
    assert_same_logits,
    prompts,
    random_walk,
)

pytestmark = pytest.mark.processes
EXPERTS, LAYERS, SLOTS = 8, 4, 6
HIDDEN, INTERMEDIATE = 64, 96
PACKED_BYTES_PER_EXPERT = (
    3 * HIDDEN * INTERMEDIATE // 2  # codes
    + 3 * HIDDEN * INTERMEDIATE // 32  # scales
    + (2 * INTERMEDIATE + HIDDEN) * 4  # biases
)


@pytest.fixture(scope="module")
def pool() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    save_mxfp4_twins(root / "packed", root / "floats")
    return root / "packed"


def shared_bytes(model: Path) -> int:
    return Checkpoint(model, load_architecture(model)).shared_bytes


def test_two_ranks_give_the_logits_of_one_also_while_experts_move(
    pool: worker_processes.Pool, model: Path
) -> None:
    requests = prompts(6)
    assert max(map(len, requests.values())) > WINDOW
    alone = ServingGroup(pool, model, 1, kv="nvfp4")
    alone.form([0], contiguous(LAYERS, EXPERTS, 1, EXPERTS))
    wanted = alone.generate(requests, 12)
    assert len({tuple(result.tokens) for result in wanted.values()}) > 3
    group = ServingGroup(pool, model, 2, kv="nvfp4", max_batched_tokens=16)
    first = contiguous(LAYERS, EXPERTS, 2, SLOTS)
    group.form([0, 1], first)
    for rank in range(2):
        read, _ = group.rank(rank).call(engine_ranks.checkpoint_bytes)
        held = int((first[:, rank] >= 0).sum())
        assert read == shared_bytes(model) + held * PACKED_BYTES_PER_EXPERT
    assert_same(group.generate(requests, 12), wanted)
    for number, slots in enumerate(random_walk(first, 2, seed=3)):
        during = {f"{name}-{number}": prompt for name, prompt in requests.items()}
        shares = group.submit(during, 12)
        group.switch(slots)
        assert_same_logits(group.results(shares), wanted, f"-{number}")
    group.check_slots()
