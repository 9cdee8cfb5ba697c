"""Every family on two ranks: the logits of one rank, bit by bit, which are those of `transformers`.

One engine's numbers are compared with `transformers` here too, so nothing is taken on trust.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_placement.initial import contiguous
from moe_worker.model.config import load_architecture
from moe_worker.model.weights import Checkpoint
from tests.support import engine_ranks, worker_processes
from tests.support.family_models import (
    CLASSES,
    NUM_TOKENS,
    SEEDS,
    assert_parity,
    prompts,
    save_family,
)
from tests.support.serving_group import ServingGroup

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("family", CLASSES)
def test_two_ranks_are_one_rank(pool: worker_processes.Pool, tmp_path: Path, family: str) -> None:
    path = save_family(tmp_path, family, max_shard_size="100KB")
    asked = prompts(SEEDS[family], lengths=(1, 30, 60, 100))
    alone = assert_parity(path, asked)
    spec = load_architecture(path)
    group = ServingGroup(pool, path, 2, kv="fp32")
    slots_LRS = contiguous(len(spec.moe_layers), spec.num_experts, 2, spec.num_experts // 2 + 1)
    group.form(range(2), slots_LRS)
    together = group.generate({f"r{i}": prompt for i, prompt in enumerate(asked)}, NUM_TOKENS)
    for rank in range(2):
        read, in_all = group.rank(rank).call(engine_ranks.checkpoint_bytes)
        held = int((slots_LRS[:, rank] >= 0).sum()) * spec.bytes_per_expert
        assert read == Checkpoint(path, spec).shared_bytes + held < in_all
    group.check_slots()
    for i, trace in enumerate(alone):
        assert together[f"r{i}"].tokens == trace.tokens
        assert together[f"r{i}"].digests == [
            hashlib.sha256(row.numpy().tobytes()).hexdigest()[:16] for row in trace.logits
        ]
