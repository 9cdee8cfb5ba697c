"""What expert parallelism costs a whole engine on CPUs: two ranks against one process.

Usage: python -m bench.ranks MODEL [--batches 16,64] [--tokens 48] [--turns 3]. Two ranks with one
thread each and one process with two threads, on the same cores and in turns within one run, decode
the same requests: with scheduler, sampling and NVFP4 cache, each rank its half. Times are of steps
in which all requests run; the work (processor time of all threads) is told besides, because a busy
machine changes it least. Tokens must be the same. MOE_KERNELS chooses the kernels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench import rank_engine
from bench.exchange import shown
from bench.rank_engine import Decoded
from moe_kernels import implementation
from moe_placement.initial import contiguous
from moe_worker.model.config import load_architecture
from moe_worker.model.spec import ModelSpec
from tests.support import worker_processes
from tests.support.expert_ranks import plan_for

RANKS, PROMPT_TOKENS = 2, 32
ALONE, APART = "one process", "ranks"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", default="16,64", help="requests in all")
    parser.add_argument("--tokens", type=int, default=48, help="of each request in one turn")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    batches = [int(batch) for batch in args.batches.split(",")]
    with worker_processes.pool(RANKS + 1, implementation.chosen()) as pool:
        arch = load_architecture(args.model)
        form(pool, args.model, arch, max(batches))
        print(f"decode, {implementation.chosen()} kernels, ms a step: median (p90)")
        for batch in batches:
            compare(pool, arch, batch, args.tokens, args.turns)
        pool.each(rank_engine.stop, [()] * (RANKS + 1))


def form(pool: worker_processes.Pool, model: Path, arch: ModelSpec, most: int) -> None:
    """Ranks 0 and 1 of the pool are the group of two, the last is the group of one."""
    for name, first, size in ((ALONE, RANKS, 1), (APART, 0, RANKS)):
        slots = contiguous(len(arch.moe_layers), arch.num_experts, size, arch.num_experts // size)
        plan = plan_for([pool.address(first + rank) for rank in range(size)], 1, slots)
        ranks = pool.ranks[first : first + size]
        for number, rank in enumerate(ranks):
            rank.post(rank_engine.serve, name, plan, number, model, RANKS // size, most)
        for rank in ranks:
            rank.result(600.0)


def compare(
    pool: worker_processes.Pool, arch: ModelSpec, batch: int, num_tokens: int, turns: int
) -> None:
    alone: list[list[Decoded]] = []
    apart: list[list[Decoded]] = []
    for turn in range(turns):
        prompts = random_prompts(batch, turn, arch.vocab_size)
        names = list(prompts)
        halves = [{name: prompts[name] for name in names[rank::RANKS]} for rank in range(RANKS)]
        alone.append(decoded(pool.ranks[RANKS:], ALONE, [prompts], num_tokens))
        apart.append(decoded(pool.ranks[:RANKS], APART, halves, num_tokens))
        got = {name: tokens for part in apart[-1] for name, tokens in part.tokens.items()}
        assert got == alone[-1][0].tokens, "two ranks drew other tokens than one process"
    one, two = Steps(alone), Steps(apart)
    print(f"  B = {batch:3d}   one process, {RANKS} threads {one}   {RANKS} ranks × 1 thread {two}")
    print(
        f"            throughput {one.median / two.median:.2f} × one process's "
        f"({one.least / two.least:.2f} × of the least disturbed steps), "
        f"{two.cpu_seconds / one.cpu_seconds:.2f} × its work, same tokens; "
        f"{batch / two.median:.0f} against {batch / one.median:.0f} tokens/s"
    )


def random_prompts(batch: int, turn: int, vocabulary: int) -> dict[str, list[int]]:
    """Other ones in each turn, so that nothing is found in the prefix cache."""
    rng = np.random.default_rng([batch, turn])
    return {
        f"{batch}-{turn}-{number}": rng.integers(0, vocabulary, PROMPT_TOKENS).tolist()
        for number in range(batch)
    }


def decoded(
    ranks: Sequence[worker_processes.Rank],
    name: str,
    parts: Sequence[dict[str, list[int]]],
    num_tokens: int,
) -> list[Decoded]:
    for rank, prompts in zip(ranks, parts, strict=True):
        rank.post(rank_engine.decode, name, prompts, num_tokens)
    results: list[Decoded] = [rank.result(600.0) for rank in ranks]
    return results


class Steps:
    """Of all turns: times of the first process, work of all, least disturbed."""

    def __init__(self, turns: Sequence[Sequence[Decoded]]) -> None:
        self.seconds = [taken for parts in turns for taken in parts[0].seconds]
        self.cpu_seconds = min(sum(part.cpu_seconds for part in parts) for parts in turns)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        return statistics.quantiles(self.seconds, n=20)[0]

    def __str__(self) -> str:
        return f"{shown(self.seconds, 1e3, 1)}, CPU {self.cpu_seconds * 1e3:.1f}"


if __name__ == "__main__":
    main()
