"""What expert parallelism costs on CPUs: TCP against gloo, two ranks against one process.

Usage: python -m bench.exchange [--repeats 200] [--turns 3] [--tokens 16]. Two ranks with one thread
each and one process with two threads, on the same cores and in turns within one run, so that what
else the machine does meets all alike; the work (processor time of all threads) is told besides,
because a busy machine changes it least. MOE_KERNELS chooses the kernels. Rows come back unsummed,
up to twice the bytes of partial sums, because only so the result is one rank's, bit for bit
(checked here, too).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from bench import exchange_ranks
from bench.exchange_ranks import LayerShape, Passes
from moe_api.worker import Carrier
from moe_kernels import implementation
from moe_placement.initial import contiguous
from tests.support import worker_processes
from tests.support.expert_ranks import plan_for

CARRIERS: tuple[Carrier, ...] = ("tcp", "gloo")
SWAP_BYTES = (88, 33 * 1024, 66 * 1024, 256 * 1024)
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=200, help="of a swap in one turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=16, help="of each rank")
    args = parser.parse_args()
    assert set(CARRIERS) < set(get_args(Carrier)), "what runs on CPUs"
    with worker_processes.pool(RANKS + 1, implementation.chosen()) as pool:
        form(pool)
        swaps(pool, args.repeats, args.turns)
        layers(pool, args.tokens, args.repeats // 20, args.turns)


def form(pool: worker_processes.Pool) -> None:
    addresses = [pool.address(rank) for rank in range(RANKS)]
    slots = contiguous(1, RANKS, RANKS, 1)
    for generation, carrier in enumerate(CARRIERS, 1):
        plan = plan_for(addresses, generation, slots)
        pool.each(exchange_ranks.join, [(plan, rank) for rank in range(RANKS)], carrier=carrier)


def swaps(pool: worker_processes.Pool, repeats: int, turns: int) -> None:
    print("exchange of n bytes each way, µs: median (p90)")
    for num_bytes in SWAP_BYTES:
        taken: dict[str, list[float]] = {carrier: [] for carrier in CARRIERS}
        for _ in range(turns):
            for carrier in CARRIERS:
                seconds = pool.each(exchange_ranks.swap, [(carrier, num_bytes, repeats)] * RANKS)
                taken[carrier] += seconds[0]
        told = "   ".join(f"{name} {shown(t, 1e6, 0)}" for name, t in taken.items())
        ratio = statistics.median(taken["gloo"]) / statistics.median(taken["tcp"])
        print(f"  {num_bytes:7d} B   {told}   gloo/tcp {ratio:.1f}")


def layers(pool: worker_processes.Pool, tokens: int, repeats: int, turns: int) -> None:
    shape = LayerShape()
    together = contiguous(shape.layers, shape.experts, 1, shape.experts)
    apart = contiguous(shape.layers, shape.experts, RANKS, shape.experts // RANKS)
    pool.ranks[RANKS].call(exchange_ranks.prepare_layers, "alone", together, shape, RANKS)
    for carrier in CARRIERS:
        pool.each(exchange_ranks.prepare_layers, [(carrier, apart, shape, 1)] * RANKS)
    seeds = list(range(RANKS))
    passes: dict[str, list[list[Passes]]] = {"alone": [], **{carrier: [] for carrier in CARRIERS}}
    for _ in range(turns):
        whole = ("alone", [RANKS * tokens], seeds, shape, repeats)
        passes["alone"].append([pool.ranks[RANKS].call(exchange_ranks.run_layers, *whole)])
        for carrier in CARRIERS:
            parts = [(carrier, [tokens] * RANKS, [seed], shape, repeats) for seed in seeds]
            passes[carrier].append(pool.each(exchange_ranks.run_layers, parts))
    print(f"MoE layer, {tokens} tokens a rank, {implementation.chosen()} kernels, ms: median (p90)")
    alone = Layer.of(passes["alone"])
    print(f"  one process, {RANKS} threads     {alone}")
    for carrier in CARRIERS:
        layer = Layer.of(passes[carrier])
        equal = "bit-equal" if torch.equal(layer.output, alone.output) else "NOT EQUAL"
        print(f"  {RANKS} ranks × 1 thread, {carrier:5s} {layer}   "
              f"{layer.median / alone.median:.2f} × one process's time, "
              f"{layer.cpu_seconds / alone.cpu_seconds:.2f} × its work, {equal}")  # fmt: skip
    pairs = tokens * shape.top_k * (RANKS - 1) / RANKS
    print(f"  rows back to a rank: {pairs * shape.hidden * 4 / 1024:.0f} KiB unsummed on average, "
          f"{tokens * shape.hidden * 4 / 1024:.0f} KiB as partial sums")  # fmt: skip


@dataclass(frozen=True)
class Layer:
    seconds: list[float]
    cpu_seconds: float
    output: torch.Tensor

    @classmethod
    def of(cls, turns: Sequence[Sequence[Passes]]) -> Layer:
        """Of all turns: times of the first process, work of all, least disturbed."""
        return cls(
            [taken for passes in turns for taken in passes[0].seconds],
            min(sum(each.cpu_seconds for each in passes) for passes in turns),
            torch.cat([each.output for each in turns[-1]]),
        )

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        return f"{shown(self.seconds, 1e3, 2)}, CPU {self.cpu_seconds * 1e3:.2f}"


def shown(seconds: Sequence[float], scale: float, digits: int) -> str:
    tenth = statistics.quantiles(seconds, n=10)[-1]
    return f"{statistics.median(seconds) * scale:.{digits}f} ({tenth * scale:.{digits}f})"


if __name__ == "__main__":
    main()
