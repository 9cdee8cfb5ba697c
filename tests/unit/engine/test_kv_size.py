"""How many blocks fit: computed before allocation, refused in numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_api.worker import KvConfig
from moe_kernels import implementation
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import KvFormat
from moe_kernels.kv_pages import allocate_pages
from moe_kernels.paged_attention import paged_attention
from moe_kernels.reference import memory as reference
from moe_kernels.router import RouterSpec
from moe_worker.engine.kv import KvCache
from moe_worker.engine.kv_size import KvDoesNotFit, KvSize, Memory, plan_blocks
from moe_worker.model.kv_layout import kv_shape
from moe_worker.model.spec import AttentionSpec, ExpertSpec, ModelSpec, RopeSpec
from moe_worker.model.weights import TORCH_DTYPES

MIB = 1 << 20
ARCH = ModelSpec(
    family="mixtral",
    num_layers=4,
    moe_layers=(0, 1, 2, 3),
    hidden=160,
    vocab_size=2048,
    max_positions=1024,
    rms_eps=1e-5,
    tie_embeddings=False,
    dtype="bfloat16",
    eos_token_ids=frozenset(),
    attention=AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=32),
    rope=RopeSpec(dim=32, theta=1e4),
    router=RouterSpec(num_experts=12, top_k=2),
    expert=ExpertSpec(intermediate=224),
)
BLOCK_BYTES = {
    name: 4 * 2 * 2 * per_vector * 16
    for name, per_vector in {
        "fp32": 128, "bf16": 64, "fp8": 32, "k8v4": 25, "nvfp4": 18, "mxfp4": 17
    }.items()
}  # fmt: skip


def plan(
    memory_bytes: int,
    max_model_len: int | None = None,
    scratch: Callable[[int], int] = lambda longest: 0,
    **kv: Any,
) -> KvSize:
    return plan_blocks(
        ARCH,
        KvConfig(**kv),
        Memory(memory_bytes, 10 * MIB, scratch),
        max_running=8,
        max_model_len=max_model_len,
    )


@pytest.mark.parametrize("dtype", BLOCK_BYTES)
def test_blocks_fill_the_fraction_of_memory_that_is_left(dtype: str) -> None:
    size = plan(13 * MIB, dtype=dtype, memory_fraction=0.8)
    free = int(13 * MIB * 0.8) - 10 * MIB
    assert size.bytes_per_block == BLOCK_BYTES[dtype]
    assert size.num_blocks == free // BLOCK_BYTES[dtype]


def test_allocating_takes_the_planned_bytes() -> None:
    for dtype in BLOCK_BYTES:
        config = KvConfig(dtype=dtype)  # type: ignore[arg-type]
        cache = KvCache.allocate(ARCH, config, 7)
        assert cache.num_bytes == 7 * BLOCK_BYTES[dtype]
        assert (cache.num_blocks, len(cache.layers)) == (7, 4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_auto_keeps_the_models_dtype(dtype: str) -> None:
    cache = KvCache.allocate(ARCH.held_in(dtype), KvConfig(dtype="auto"), 2)
    assert cache.layers[0].tensors[0].dtype == TORCH_DTYPES[dtype]


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


def test_scratch_is_kept_free_for_the_longest_sequence() -> None:
    """2 MiB for the shortest, and 3 kB more for each token."""

    def scratch(longest: int) -> int:
        return 2 * MIB + 3000 * longest

    size = plan(15 * MIB, scratch=scratch, memory_fraction=0.95, max_model_len=500)
    free = int(15 * MIB * 0.95) - 10 * MIB - scratch(500)
    assert size.num_blocks == free // BLOCK_BYTES["nvfp4"]


def test_without_a_length_the_longest_that_fits_beside_its_scratch_is_served() -> None:
    def scratch(longest: int) -> int:
        return 4000 * longest

    size = plan(14 * MIB, scratch=scratch, memory_fraction=0.95)
    free = int(14 * MIB * 0.95) - 10 * MIB
    assert size.max_model_len < 1024
    assert size.max_model_len % 16 == 0
    assert size.num_blocks * size.bytes_per_block + scratch(size.max_model_len) <= free
    longer = size.max_model_len + 16
    assert (longer // 16) * size.bytes_per_block + scratch(longer) > free


def test_a_length_whose_scratch_does_not_fit_is_refused_in_numbers() -> None:
    with pytest.raises(KvDoesNotFit, match=r"less 10485760 .* and 4096000 for attention over 1024"):
        plan(14 * MIB, 1024, scratch=lambda longest: 4000 * longest)
    with pytest.raises(KvDoesNotFit, match=r"kvCache.blocks 50 .* for attention over 800 tokens"):
        plan(14 * MIB, blocks=50, scratch=lambda longest: 4000 * longest)


def test_attention_allocates_no_more_than_was_counted() -> None:
    """Of one pass that a single long sequence fills: what torch asks for, counted."""
    attention = ARCH.grouped_query
    length = 20_000
    pages = allocate_pages(KvFormat("nvfp4"), kv_shape(ARCH), -(-length // 16), 16)
    plan = plan_attention([AttentionRows(length - 1, 1, range(len(pages.tensors[0])))], 16)
    q = torch.randn(1, attention.num_heads, attention.head_dim)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as profile:
        with implementation.using("reference"):
            paged_attention(q, pages, plan)
    assert profile.profiler is not None
    peak = held = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    counted = reference.attention_bytes(
        attention.num_heads, attention.head_dim, attention.kv_elements, length
    )
    assert 0 < peak <= counted
    assert counted < 2.5 * peak
