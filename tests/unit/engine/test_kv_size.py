"""How many blocks fit: computed before allocation, refused in numbers."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api.worker import KvConfig
from moe_worker.engine.kv import KvCache, KvDoesNotFit, KvSize, plan_blocks
from moe_worker.model.config import ModelArchitecture
from moe_worker.model.weights import TORCH_DTYPES

MIB = 1 << 20
ARCH = ModelArchitecture(
    num_layers=4,
    moe_layers=(0, 1, 2, 3),
    hidden=160,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate=224,
    num_experts=12,
    top_k=2,
    vocab_size=2048,
    rope_theta=1e4,
    rms_eps=1e-5,
    max_positions=1024,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=frozenset(),
)
BLOCK_BYTES = {"nvfp4": 4 * 2 * 2 * 18 * 16, "bf16": 4 * 2 * 2 * 64 * 16}


def plan(memory_bytes: int, max_model_len: int | None = None, **kv: Any) -> KvSize:
    return plan_blocks(
        ARCH,
        KvConfig(**kv),
        memory_bytes=memory_bytes,
        reserved_bytes=10 * MIB,
        max_running=8,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("dtype", ["nvfp4", "bf16"])
def test_blocks_fill_the_fraction_of_memory_that_is_left(dtype: str) -> None:
    size = plan(13 * MIB, dtype=dtype, memory_fraction=0.8)
    free = int(13 * MIB * 0.8) - 10 * MIB
    assert size.bytes_per_block == BLOCK_BYTES[dtype]
    assert size.num_blocks == free // BLOCK_BYTES[dtype]


def test_allocating_takes_the_planned_bytes() -> None:
    for dtype in ("nvfp4", "bf16"):
        config = KvConfig(dtype=dtype)  # type: ignore[arg-type]
        cache = KvCache.allocate(ARCH, config, 7)
        assert cache.num_bytes == 7 * BLOCK_BYTES[dtype]
        assert (cache.num_blocks, len(cache.layers)) == (7, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_keeps_the_models_dtype(dtype: str) -> None:
    cache = KvCache.allocate(ARCH.held_in(dtype), KvConfig(dtype="auto"), 2)
    assert cache.layers[0].data.dtype == TORCH_DTYPES[dtype]


def test_no_more_blocks_than_all_running_sequences_can_fill() -> None:
    assert plan(10_000 * MIB).num_blocks == 8 * 1024 // 16
    assert plan(10_000 * MIB, max_model_len=100).num_blocks == 8 * 7


def test_the_longest_sequence_is_bounded_by_the_cache() -> None:
    assert plan(10_000 * MIB).max_model_len == 1024
    assert plan(100 * MIB, blocks=5).max_model_len == 80
    assert plan(100 * MIB, blocks=7, max_model_len=100).max_model_len == 100


@pytest.mark.parametrize(
    ("memory_mib", "options", "message"),
    [
        (11, {}, r"0 blocks of 16 tokens, at least 1 .* of 11534336 less 10485760"),
        (100, {"blocks": 6, "max_model_len": 100}, "6 blocks of 16 tokens, at least 7 are needed"),
        (100, {"blocks": 100_000}, r"kvCache.blocks 100000 need 460800000 bytes"),
        (100, {"max_model_len": 2000}, "maxModelLen 2000 exceeds the model's 1024 positions"),
    ],
)
def test_what_does_not_fit_is_refused_in_numbers(
    memory_mib: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(KvDoesNotFit, match=message):
        plan(memory_mib * MIB, **options)
