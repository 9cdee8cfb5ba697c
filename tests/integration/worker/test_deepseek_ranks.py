"""DeepSeek on two ranks: the logits of one rank, bit by bit, with latents in FP8 and FP4 too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_placement.initial import contiguous
from moe_worker.model.config import load_architecture
from tests.support import worker_processes
from tests.support.deepseek_models import save_deepseek, save_fp8_and_twin
from tests.support.serving_group import ServingGroup, assert_same, prompts

pytestmark = pytest.mark.processes
MAX_TOKENS = 16


@pytest.fixture(scope="module")
def pool() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(2) as ranks:
        yield ranks


def served(pool: worker_processes.Pool, path: Path, size: int, **config: Any) -> ServingGroup:
    spec = load_architecture(path)
    group = ServingGroup(pool, path, size, **config)
    group.form(
        range(size),
        contiguous(len(spec.moe_layers), spec.num_experts, size, spec.num_experts // size + 1),
    )
    return group


@pytest.mark.parametrize(
    ("family", "dtype", "kv"),
    [("deepseek_v2", torch.bfloat16, "fp8"), ("deepseek_v3", torch.float32, "nvfp4")],
)
def test_two_ranks_are_one_rank(
    pool: worker_processes.Pool, tmp_path: Path, family: str, dtype: torch.dtype, kv: str
) -> None:
    path = save_deepseek(tmp_path, family, dtype=dtype)
    requests = prompts(6)
    wanted = served(pool, path, 1, kv=kv).generate(requests, MAX_TOKENS)
    assert len({tuple(result.tokens) for result in wanted.values()}) > 3
    group = served(pool, path, 2, kv=kv, max_batched_tokens=16)
    assert_same(group.generate(requests, MAX_TOKENS), wanted)
    group.check_slots()


def test_fp8_experts_on_two_ranks_are_their_decoded_twin_on_one(
    pool: worker_processes.Pool, tmp_path: Path
) -> None:
    plain = save_deepseek(tmp_path / "plain", "deepseek_v3", seed=3, dtype=torch.bfloat16)
    save_fp8_and_twin(plain, tmp_path / "fp8", tmp_path / "twin")
    requests = prompts(4, seed=5)
    wanted = served(pool, tmp_path / "twin", 1, kv="bf16").generate(requests, MAX_TOKENS)
    group = served(pool, tmp_path / "fp8", 2, kv="bf16")
    assert_same(group.generate(requests, MAX_TOKENS), wanted)
    group.check_slots()
