"""The prefix cache changes no number: tokens and logits are the same bits with and without hits,
through copies, evictions and preemptions, in every format of the cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_worker.engine.runner import Runner
from moe_worker.engine.sampling_params import SamplingParams
from moe_worker.engine.scheduler import Scheduler
from moe_worker.engine.sequence import Sequence as Generation
from tests.support.local_moe import BrokenMoe
from tests.support.models import save_random_mixtral
from tests.support.one_rank import OneRank, Trace, run_all

pytestmark = pytest.mark.usefixtures("implementation")
MAX_TOKENS = 6
LENGTHS = (5, 16, 17, 32, 48, 75)
"""Below, at and above whole blocks of 16: from a whole one the last token is computed in a copy."""
KV_DTYPES = ["fp32", "k8v4", "nvfp4"]


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    path: Path = tmp_path_factory.mktemp("model")
    save_random_mixtral(path, seed=4, top_k=4, num_kv_heads=4)
    return OneRank.load(path)


def prompts(seed: int = 9, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module", params=KV_DTYPES)
def cold(
    implementation: str, rank: OneRank, request: pytest.FixtureRequest
) -> tuple[Any, list[Trace]]:
    """(KV format, what the prompts give without a prefix cache)."""
    traces = rank.generate(
        prompts(), max_tokens=MAX_TOKENS, kv_dtype=request.param, prefix_caching=False
    )
    return request.param, traces


def run(
    scheduler: Scheduler,
    runner: Runner,
    rank: OneRank,
    wanted: Sequence[Sequence[int]],
    max_tokens: int = MAX_TOKENS,
) -> tuple[list[Trace], list[Generation]]:
    """All prompts together in an engine that may have been used before."""
    seqs = [
        Generation(f"r{index}", tuple(prompt), SamplingParams(max_tokens=max_tokens))
        for index, prompt in enumerate(wanted)
    ]
    traces = {seq.request_id: Trace() for seq in seqs}
    for seq in seqs:
        scheduler.add(seq)
    run_all(scheduler, runner, rank.moe, traces)
    return list(traces.values()), seqs


def assert_bit_equal(traces: Sequence[Trace], expected: Sequence[Trace]) -> None:
    for trace, other in zip(traces, expected, strict=True):
        assert trace.tokens == other.tokens
        assert torch.equal(torch.stack(trace.logits), torch.stack(other.logits))


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
def test_a_hit_gives_the_same_bits_at_every_chunk_size(
    rank: OneRank, cold: tuple[Any, list[Trace]], chunk: int
) -> None:
    kv_dtype, expected = cold
    scheduler, runner = rank.engine(
        kv_dtype=kv_dtype, max_batched_tokens=chunk, max_running=min(8, chunk)
    )
    first, seqs = run(scheduler, runner, rank, prompts())
    assert [seq.num_cached_tokens for seq in seqs] == [0] * len(LENGTHS)
    again, seqs = run(scheduler, runner, rank, prompts())
    assert [seq.num_cached_tokens for seq in seqs] == [0, 15, 16, 31, 47, 64]
    assert_bit_equal(first, expected)
    assert_bit_equal(again, expected)


def test_a_conversation_finds_its_own_answers(rank: OneRank, cold: tuple[Any, list[Trace]]) -> None:
    kv_dtype, _ = cold
    scheduler, runner = rank.engine(kv_dtype=kv_dtype)
    opening = prompts(lengths=(30,))[0]
    answers, _ = run(scheduler, runner, rank, [opening], max_tokens=20)
    longer = [*opening, *answers[0].tokens, 7, 8, 9]
    traces, seqs = run(scheduler, runner, rank, [longer])
    assert seqs[0].num_cached_tokens == 48, "more than the prompt's own blocks"
    cold_traces = rank.generate(
        [longer], max_tokens=MAX_TOKENS, kv_dtype=kv_dtype, prefix_caching=False
    )
    assert_bit_equal(traces, cold_traces)


def test_requests_that_arrive_together_share_their_prompt(
    rank: OneRank, cold: tuple[Any, list[Trace]]
) -> None:
    kv_dtype, expected = cold
    scheduler, runner = rank.engine(kv_dtype=kv_dtype)
    same = [prompts()[4]] * 5
    traces, seqs = run(scheduler, runner, rank, same)
    assert [seq.num_cached_tokens for seq in seqs] == [0, 47, 47, 47, 47]
    assert_bit_equal(traces, [expected[4]] * 5)


def test_preempted_sequences_resume_from_the_cache_with_the_same_bits(
    rank: OneRank, cold: tuple[Any, list[Trace]]
) -> None:
    """Each of three requests grows to six blocks; the pool holds fourteen."""
    kv_dtype, _ = cold
    many = prompts(seed=3, lengths=(60, 62, 64))
    alone = [
        rank.generate([prompt], max_tokens=30, kv_dtype=kv_dtype, prefix_caching=False)[0]
        for prompt in many
    ]
    scheduler, runner = rank.engine(kv_dtype=kv_dtype, num_blocks=14, max_batched_tokens=24)
    computed: list[int] = []
    run_model = runner.run

    def counting(schedule: Any, moe: Any) -> dict[str, int]:
        computed.append(schedule.num_tokens)
        return run_model(schedule, moe)

    runner.run = counting  # type: ignore[method-assign]
    traces, seqs = run(scheduler, runner, rank, many, max_tokens=30)
    assert max(seq.num_starts for seq in seqs) > 1
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0], "to resume is not to find a prompt"
    restarted = sum(seq.num_tokens * (seq.num_starts - 1) for seq in seqs)
    assert sum(computed) < sum(seq.num_tokens for seq in seqs) + restarted // 2
    assert_bit_equal(traces, alone)


def test_churn_with_evictions_changes_nothing(rank: OneRank, cold: tuple[Any, list[Trace]]) -> None:
    """Known prompts among others, in a pool that holds a third of all of them."""
    kv_dtype, expected = cold
    scheduler, runner = rank.engine(kv_dtype=kv_dtype, num_blocks=12, max_batched_tokens=20)
    num_cached = 0
    for seed in range(4):
        others = prompts(seed=100 + seed, lengths=(40, 33))
        mixed = [prompts()[seed + 1], others[0], prompts()[seed + 2], others[1], prompts()[2]]
        traces, seqs = run(scheduler, runner, rank, mixed)
        num_cached += sum(seq.num_cached_tokens for seq in seqs)
        assert_bit_equal(
            [traces[0], traces[2], traces[4]], [expected[seed + 1], expected[seed + 2], expected[2]]
        )
    assert num_cached > 0


def test_a_full_hit_that_runs_again_after_a_failure_gives_the_same(
    rank: OneRank, cold: tuple[Any, list[Trace]]
) -> None:
    """The step that copies a block fails half-way and is run again."""
    kv_dtype, expected = cold
    scheduler, runner = rank.engine(kv_dtype=kv_dtype)
    run(scheduler, runner, rank, [prompts()[3]])
    seq = Generation("again", tuple(prompts()[3]), SamplingParams(max_tokens=MAX_TOKENS))
    scheduler.add(seq)

    schedule = scheduler.schedule()
    assert schedule.copies
    with pytest.raises(ConnectionError):
        runner.run(schedule, BrokenMoe(rank.moe))
    trace = Trace()
    run_all(scheduler, runner, rank.moe, {"again": trace})
    assert seq.num_cached_tokens == 31
    assert_bit_equal([trace], [expected[3]])
