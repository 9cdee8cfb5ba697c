"""One layer's decode attention over pages: kernels against the reference and torch's own, in a run.

    python bench/attention.py [--head-dim 64] [--threads 2] [--rounds 5]

Every step reads another layer's pages, as a model does, so that what fits no cache is not found in
one. `sdpa` gathers and decodes the pages with torch and calls scaled_dot_product_attention on them,
the query heads of a kv head as rows. Times are the medians of rounds that run in turn; read the
ratios, not the milliseconds. GB/s are the stored bytes that a step must read.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import implementation, kv_pages
from moe_kernels.attention_plan import AttentionPlan, AttentionRows, plan_attention
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, allocate_pages
from moe_kernels.paged_attention import paged_attention

KV_HEADS, GROUP, BLOCK, LAYERS = 4, 2, 16, 8
FORMATS: tuple[KvFormatName, ...] = ("bf16", "nvfp4")
CASES = ((1, 128), (16, 128), (1, 2048), (16, 2048))


@dataclass(frozen=True)
class Step:
    """A decode step of sequences of one length, whose blocks lie scattered in every layer."""

    layers: list[KvPages]
    tables_SB: Tensor
    plan: AttentionPlan
    q_THD: Tensor

    @property
    def read_bytes(self) -> int:
        return self.layers[0].num_bytes


def make_step(name: KvFormatName, batch: int, context: int, dim: int) -> Step:
    generator = torch.Generator().manual_seed(0)
    per_sequence = context // BLOCK
    blocks = batch * per_sequence
    tables_SB = torch.randperm(blocks, generator=generator).view(batch, per_sequence)
    layers = []
    for _ in range(LAYERS):
        pages = allocate_pages(KvFormat(name), HeadsShape(KV_HEADS, dim), blocks, BLOCK)
        k_TND, v_TND = torch.randn(2, blocks * BLOCK, KV_HEADS, dim, generator=generator)
        kv_pages.append(pages, k_TND, v_TND, torch.arange(blocks * BLOCK))
        layers.append(pages)
    rows = [AttentionRows(context - 1, 1, table) for table in tables_SB.tolist()]
    q_THD = torch.randn(batch, KV_HEADS * GROUP, dim, generator=generator)
    return Step(layers, tables_SB, plan_attention(rows, BLOCK), q_THD)


def ours(step: Step, layer: int) -> Tensor:
    return paged_attention(step.q_THD, step.layers[layer], step.plan)


def sdpa(step: Step, layer: int) -> Tensor:
    k_SNLD, v_SNLD = kv_pages.read(step.layers[layer], step.tables_SB)
    q_SNGD = step.q_THD.view(len(step.q_THD), KV_HEADS, GROUP, -1)
    out_SNGD = torch.nn.functional.scaled_dot_product_attention(q_SNGD, k_SNLD, v_SNLD)
    return out_SNGD.reshape(step.q_THD.shape)


def milliseconds(run: Callable[[Step, int], Tensor], step: Step, least_seconds: float) -> float:
    """Per layer, over whole sweeps of the layers for at least so long."""
    begin, sweeps = time.perf_counter(), 0
    while not sweeps or time.perf_counter() - begin < least_seconds:
        for layer in range(LAYERS):
            run(step, layer)
        sweeps += 1
    return (time.perf_counter() - begin) * 1e3 / sweeps / LAYERS


def measure(step: Step, rounds: int, least_seconds: float) -> dict[str, float]:
    """Milliseconds of each way, which must agree first."""
    times: dict[str, list[float]] = {"cpu": [], "sdpa": [], "reference": []}
    expected = ours(step, 0)
    with implementation.using("cpu"):
        torch.testing.assert_close(ours(step, 0), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(sdpa(step, 0), expected, rtol=0, atol=1e-5)
    for _ in range(rounds):
        with implementation.using("cpu"):
            times["cpu"].append(milliseconds(ours, step, least_seconds))
        times["sdpa"].append(milliseconds(sdpa, step, least_seconds))
        times["reference"].append(milliseconds(ours, step, least_seconds))
    return {way: statistics.median(of_way) for way, of_way in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each way in a round")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    implementation.select("reference")
    print("| B | context | format | cpu ms | GB/s | sdpa ÷ cpu | reference ÷ cpu | to bf16 |")
    print("|---|---|---|---|---|---|---|---|")
    for batch, context in CASES:
        plain = 0.0
        for name in FORMATS:
            step = make_step(name, batch, context, args.head_dim)
            found = measure(step, args.rounds, args.seconds)
            own = found["cpu"]
            plain = plain or own
            rate = step.read_bytes / own / 1e6
            print(
                f"| {batch} | {context} | {name} | {own:.3f} | {rate:.1f} "
                f"| {found['sdpa'] / own:.1f} | {found['reference'] / own:.1f} "
                f"| {own / plain:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
