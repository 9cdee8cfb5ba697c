"""Latent attention in the engine: a request's logits are the same bits in any chunks and company,
in every KV format that can hold latents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.support.deepseek_models import save_deepseek
from tests.support.family_models import prompts
from tests.support.one_rank import OneRank, Trace

pytestmark = pytest.mark.usefixtures("implementation")
LENGTHS = (15, 63, 1)
MAX_TOKENS = 6
CASES = [
    ("deepseek_v2", torch.float32, "fp32"),
    ("deepseek_v2", torch.float32, "fp8"),
    ("deepseek_v3", torch.bfloat16, "bf16"),
    ("deepseek_v3", torch.bfloat16, "nvfp4"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OneRank]:
    return {
        family: OneRank.load(
            save_deepseek(
                tmp_path_factory.mktemp(family), family, seed=4, dtype=dtype, num_hidden_layers=2
            )
        )
        for family, dtype, _ in CASES
    }


@pytest.fixture(scope="module", params=CASES, ids=[f"{case[0]}-{case[2]}" for case in CASES])
def together(
    implementation: str, ranks: dict[str, OneRank], request: pytest.FixtureRequest
) -> tuple[OneRank, Any, list[Trace]]:
    """(Model, KV format, what the requests give in one batch, prompts in one piece)."""
    family, _, kv_dtype = request.param
    return ranks[family], kv_dtype, generate(ranks[family], kv_dtype)


def generate(rank: OneRank, kv_dtype: Any, **options: Any) -> list[Trace]:
    asked = options.pop("asked", prompts(9, LENGTHS))
    return rank.generate(asked, max_tokens=MAX_TOKENS, kv_dtype=kv_dtype, **options)


def assert_bit_equal(traces: Sequence[Trace], expected: Sequence[Trace]) -> None:
    for trace, other in zip(traces, expected, strict=True):
        assert trace.tokens == other.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(other.logits))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunk_size_does_not_matter(together: tuple[OneRank, Any, list[Trace]], chunk: int) -> None:
    rank, kv_dtype, expected = together
    assert_bit_equal(generate(rank, kv_dtype, max_batched_tokens=chunk), expected)


def test_alone_is_as_batched(together: tuple[OneRank, Any, list[Trace]]) -> None:
    rank, kv_dtype, expected = together
    alone = [generate(rank, kv_dtype, asked=[prompt])[0] for prompt in prompts(9, LENGTHS)]
    assert_bit_equal(alone, expected)


def test_block_size_does_not_matter(together: tuple[OneRank, Any, list[Trace]]) -> None:
    rank, kv_dtype, expected = together
    assert_bit_equal(generate(rank, kv_dtype, block_size=32), expected)


def test_preempted_and_computed_again_is_the_same(
    together: tuple[OneRank, Any, list[Trace]],
) -> None:
    rank, kv_dtype, expected = together
    traces = generate(rank, kv_dtype, num_blocks=6, prefix_caching=False)
    assert rank.num_preemptions > 0
    assert_bit_equal(traces, expected)


def test_quantised_latents_cost_accuracy_in_the_order_of_their_bits(
    ranks: dict[str, OneRank],
) -> None:
    """Of the first token's logits, whose cache is the same in every format but for its code."""
    rank = ranks["deepseek_v2"]
    exact = first_logits(rank, "fp32")
    errors = [float((first_logits(rank, kv) - exact).norm()) for kv in ("bf16", "fp8", "nvfp4")]
    assert 0 < errors[0] < errors[1] < errors[2]


def first_logits(rank: OneRank, kv_dtype: Any) -> torch.Tensor:
    traces = rank.generate(prompts(9, (75, 60, 50)), max_tokens=1, kv_dtype=kv_dtype)
    return torch.stack([trace.logits[0] for trace in traces])
