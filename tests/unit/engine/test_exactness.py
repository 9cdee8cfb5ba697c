"""The property everything rests on: a request's logits are the same bits in any company.

One rank, all experts local. Every variant of running the same requests is compared, bit by bit,
with running them together in one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.sequence import Sequence as Generation
from tests.support.local_moe import BrokenMoe
from tests.support.models import save_random_mixtral
from tests.support.one_rank import OneRank, Trace

pytestmark = pytest.mark.usefixtures("implementation")
MAX_TOKENS = 10
KV_DTYPES = ["fp32", "bf16", "k8v4", "nvfp4", "mxfp4"]


@pytest.fixture(scope="module", params=["top2-bf16", "top4-fp32"])
def rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    path: Path = tmp_path_factory.mktemp("model")
    if request.param == "top2-bf16":
        save_random_mixtral(path, seed=2, top_k=2, dtype=torch.bfloat16)
    else:
        save_random_mixtral(path, seed=4, top_k=4, num_kv_heads=4)
    return OneRank.load(path)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (5, 17, 75, 33, 1)]


@pytest.fixture(scope="module", params=KV_DTYPES)
def together(
    implementation: str, rank: OneRank, request: pytest.FixtureRequest
) -> tuple[Any, list[Trace]]:
    """(KV format, what the requests give in one batch, prompts in one piece)."""
    return request.param, rank.generate(prompts(), max_tokens=MAX_TOKENS, kv_dtype=request.param)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def assert_bit_equal(traces: Sequence[Trace], expected: Sequence[Trace]) -> None:
    for trace, other in zip(traces, expected, strict=True):
        assert trace.tokens == other.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(other.logits))


@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_chunk_size_does_not_matter(
    rank: OneRank, together: tuple[Any, list[Trace]], chunk: int
) -> None:
    kv_dtype, expected = together
    traces = rank.generate(
        prompts(), max_tokens=MAX_TOKENS, kv_dtype=kv_dtype, max_batched_tokens=chunk
    )
    assert_bit_equal(traces, expected)


def test_alone_is_as_batched(rank: OneRank, together: tuple[Any, list[Trace]]) -> None:
    kv_dtype, expected = together
    alone = [
        rank.generate([prompt], max_tokens=MAX_TOKENS, kv_dtype=kv_dtype)[0] for prompt in prompts()
    ]
    assert_bit_equal(alone, expected)


def test_order_of_arrival_and_block_size_do_not_matter(
    rank: OneRank, together: tuple[Any, list[Trace]]
) -> None:
    kv_dtype, expected = together
    traces = rank.generate(
        prompts()[::-1],
        max_tokens=MAX_TOKENS,
        kv_dtype=kv_dtype,
        block_size=64,
        max_running=2,
        max_batched_tokens=7,
    )
    assert_bit_equal(traces[::-1], expected)


def test_preemption_gives_identical_tokens(
    rank: OneRank, together: tuple[Any, list[Trace]]
) -> None:
    """Each of two long requests grows to six blocks; the pool holds eleven."""
    kv_dtype, expected = together
    many = prompts()[2:3] * 2 + prompts()[1:2]
    traces = rank.generate(
        many,
        max_tokens=MAX_TOKENS,
        kv_dtype=kv_dtype,
        num_blocks=11,
        max_batched_tokens=64,
        prefix_caching=False,
    )
    assert rank.num_preemptions > 0
    assert_bit_equal(traces, [expected[2], expected[2], expected[1]])


def test_the_model_decides_by_margins_and_formats_differ(rank: OneRank) -> None:
    """Else the tests above would hold for a model that ignores its cache or repeats one token."""
    texts = {
        kv_dtype: rank.generate(prompts(), max_tokens=MAX_TOKENS, kv_dtype=kv_dtype)
        for kv_dtype in KV_DTYPES
    }
    assert len({token for trace in texts["fp32"] for token in trace.tokens}) >= 10
    first = {kv_dtype: traces[2].logits[0] for kv_dtype, traces in texts.items()}
    spread = float(first["fp32"].std())
    errors = [float((first[kv] - first["fp32"]).abs().max()) / spread for kv in ("bf16", "nvfp4")]
    assert 0 < errors[0] < errors[1] < 2.0


def test_a_step_run_again_gives_the_same(rank: OneRank) -> None:
    """A failed step is not committed; its keys and values are written again with equal values."""
    scheduler, runner = rank.engine(kv_dtype="nvfp4", max_batched_tokens=16)
    for index, prompt in enumerate(prompts()):
        params = SamplingParams(max_tokens=4, temperature=1.0, seed=index)
        scheduler.add(Generation(str(index), tuple(prompt), params))
    while scheduler.has_work:
        first = runner.run(scheduler.schedule(), rank.moe)
        logits = runner.last_logits
        schedule = scheduler.schedule()
        assert runner.run(schedule, rank.moe) == first
        assert logits is not None
        assert runner.last_logits is not None
        assert torch.equal(runner.last_logits, logits)
        scheduler.commit(schedule, first)


def test_a_failing_expert_layer_leaves_the_sequences_as_they_were(rank: OneRank) -> None:
    expected = rank.generate(prompts()[:2], max_tokens=MAX_TOKENS, kv_dtype="nvfp4")
    scheduler, runner = rank.engine(kv_dtype="nvfp4")
    seqs = [
        Generation(str(i), tuple(prompt), SamplingParams(max_tokens=MAX_TOKENS))
        for i, prompt in enumerate(prompts()[:2])
    ]
    for seq in seqs:
        scheduler.add(seq)

    while scheduler.has_work:
        with pytest.raises(ConnectionError):
            runner.run(scheduler.schedule(), BrokenMoe(rank.moe))
        schedule = scheduler.schedule()
        scheduler.commit(schedule, runner.run(schedule, rank.moe))
    assert [seq.output for seq in seqs] == [trace.tokens for trace in expected]


def test_sampled_text_depends_on_the_seed_alone(rank: OneRank) -> None:
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, seed=11)
    batched = rank.generate(prompts(), params=params, max_batched_tokens=9)
    alone = [rank.generate([prompt], params=params)[0] for prompt in prompts()]
    assert_bit_equal(alone, batched)
    other = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.9, seed=12)
    assert rank.generate(prompts(), params=other)[2].tokens != batched[2].tokens


@pytest.mark.usefixtures("two_threads")
def test_number_of_threads_does_not_matter(rank: OneRank) -> None:
    with_two = rank.generate(prompts(), max_tokens=4, kv_dtype="nvfp4")
    torch.set_num_threads(1)
    assert_bit_equal(rank.generate(prompts(), max_tokens=4, kv_dtype="nvfp4"), with_two)


def test_an_idle_step_still_calls_every_expert_layer(rank: OneRank) -> None:
    scheduler, runner = rank.engine()
    rank.moe.calls.clear()
    assert runner.run(scheduler.schedule(), rank.moe) == {}
    assert rank.moe.calls == [0] * len(rank.arch.moe_layers)
    assert runner.last_logits is not None
    assert runner.last_logits.shape == (0, rank.arch.vocab_size)
