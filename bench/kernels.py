"""Products, experts, norm, rope and sort: kernels against the reference and torch's own, in a run.

    python bench/kernels.py [--threads 2] [--rounds 3] [--batches 1 4 16 64]

Shapes are those of a Qwen3-MoE of 111 M parameters: hidden 512, 12 heads of 64 (query and key), 32
experts of 256, top-4. Every call reads another copy of the weights, as another layer would, so that
what fits no cache is not found in one. The ways of one operation run in turn; a time is the lower
decile of all its calls, for a busy machine only ever adds. Read the ratios, not the microseconds.
GB/s are the weights that a call must read, against what the same threads read in this run when
they add up numbers. `library` is torch's own, without a promise about a row's bits: F.linear,
F.grouped_mm, F.rms_norm, in the dtype of the weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import implementation
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.parts import meet, new_board, take, take_next
from moe_kernels.cpu.team import num_threads, together
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.permute import sort_by_slot

HIDDEN, HEADS, HEAD_DIM, EXPERTS, INTERMEDIATE, TOP_K = 512, 12, 64, 32, 256, 4
COPIES_OF_EXPERTS, BYTES_OF_COPIES = 8, 128 << 20
CALLS = 32
"""Of a way in a round."""
READ_BYTES, READ_SLICES = 256 << 20, 64

Way = Callable[[int], object]
"""Call number n, with the weights of its turn."""


@dataclass(frozen=True)
class Case:
    name: str
    weight_bytes: float
    """Of all that a call must read, on average over the calls; 0 where there are no weights."""
    contract: Way
    library: Way | None = None


@dataclass(frozen=True)
class Timing:
    """Seconds a call."""

    ours: float
    reference: float
    library: float | None


def linear_case(name: str, batch: int, outputs: int, dtype: torch.dtype) -> Case:
    copies = min(CALLS, max(8, BYTES_OF_COPIES // (outputs * HIDDEN * dtype.itemsize)))
    weights = [torch.randn(outputs, HIDDEN).to(dtype) for _ in range(copies)]
    x = torch.randn(batch, HIDDEN)
    rounded = x.to(dtype)
    return Case(
        f"{name} 512→{outputs}",
        weights[0].nbytes,
        lambda n: linear(x, weights[n % copies]),
        lambda n: F.linear(rounded, weights[n % copies]),
    )


def experts_case(name: str, batch: int, dtype: torch.dtype) -> Case:
    copies = range(COPIES_OF_EXPERTS)
    w13s = [torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN).to(dtype) for _ in copies]
    w2s = [torch.randn(EXPERTS, HIDDEN, INTERMEDIATE).to(dtype) for _ in copies]
    offsets = [sort_by_slot(random_choices(batch), EXPERTS)[1] for _ in range(CALLS)]
    ends = [bounds[1:].to(torch.int32) for bounds in offsets]
    x = torch.randn(batch * TOP_K, HIDDEN)
    rounded = x.to(dtype)
    touched = sum(int((bounds.diff() > 0).sum()) for bounds in offsets) / len(offsets)

    def library(n: int) -> Tensor:
        w13, w2 = w13s[n % COPIES_OF_EXPERTS], w2s[n % COPIES_OF_EXPERTS]
        both = F.grouped_mm(rounded, w13.transpose(-2, -1), offs=ends[n])
        gate, up = both.chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends[n])

    return Case(
        f"{name} ({touched:.1f} of {EXPERTS})",
        touched * (w13s[0].nbytes + w2s[0].nbytes) / EXPERTS,
        lambda n: expert_mlp(
            x, offsets[n], w13s[n % COPIES_OF_EXPERTS], w2s[n % COPIES_OF_EXPERTS]
        ),
        library,
    )


def small_cases(batch: int) -> Iterator[Case]:
    x, weight = torch.randn(batch, HIDDEN), torch.randn(HIDDEN)
    yield Case(
        "rms_norm",
        0,
        lambda n: rms_norm(x, weight, 1e-6),
        lambda n: F.rms_norm(x, (HIDDEN,), weight, 1e-6),
    )
    heads = torch.randn(batch, HEADS, HEAD_DIM)
    table = torch.randn(batch, HEAD_DIM // 2)
    yield Case("rope", 0, lambda n: rope(heads, table, table))
    choices = random_choices(batch)
    yield Case("sort", 0, lambda n: sort_by_slot(choices, EXPERTS))


def random_choices(batch: int) -> Tensor:
    return torch.rand(batch, EXPERTS).topk(TOP_K).indices


def cases(batch: int) -> Iterator[Case]:
    yield linear_case("router fp32", batch, EXPERTS, torch.float32)
    yield linear_case("qkv bf16", batch, 1024, torch.bfloat16)
    yield linear_case("head bf16", batch, 4096, torch.bfloat16)
    yield linear_case("qkv fp32", batch, 1024, torch.float32)
    yield experts_case("experts bf16", batch, torch.bfloat16)
    yield experts_case("experts fp32", batch, torch.float32)
    yield from small_cases(batch)


def measure(case: Case, rounds: int) -> Timing:
    ways: dict[str, tuple[Way, str]] = {
        "cpu": (case.contract, "cpu"),
        "reference": (case.contract, "reference"),
    }
    if case.library is not None:
        ways["library"] = (case.library, "reference")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        call_seconds(*way, calls=1)
    for _ in range(rounds):
        for name, way in ways.items():
            seconds[name] += call_seconds(*way, calls=CALLS)
    deciles = {name: sorted(of_calls)[len(of_calls) // 10] for name, of_calls in seconds.items()}
    return Timing(deciles["cpu"], deciles["reference"], deciles.get("library"))


def call_seconds(way: Way, kernels: str, calls: int) -> list[float]:
    found = []
    with implementation.using(kernels), torch.inference_mode():
        for call in range(calls):
            start = time.perf_counter()
            way(call)
            found.append(time.perf_counter() - start)
    return found


@compiled
def _sum_part(part: Index, parts: int, numbers: Array, sums: Array) -> None:
    total = np.int64(0)
    for i in range(numbers.size * part // parts, numbers.size * (part + 1) // parts):
        total += numbers[i]
    sums[part] = total


@compiled
def _sum(numbers: Array, sums: Array, threads: int) -> None:
    together(_walk, threads, new_board(1), numbers, sums)


@inner
def _walk(board: Array, numbers: Array, sums: Array) -> None:
    part = take(board, 0)
    while part < sums.size:
        _sum_part(part, sums.size, numbers, sums)
        part = take_next(board, 0)
    meet(board, 0, sums.size)


def read_bytes_per_second(rounds: int) -> float:
    """Of slices one after the other of more memory than any cache holds; the fastest, as a roof."""
    slices = np.ones((READ_SLICES, READ_BYTES // READ_SLICES // 8), np.int64)
    threads = num_threads()
    sums = np.zeros(threads, np.int64)
    _sum(slices[0], sums, threads)
    seconds = []
    for _ in range(rounds):
        for numbers in slices:
            start = time.perf_counter()
            _sum(numbers, sums, threads)
            seconds.append(time.perf_counter() - start)
            assert sums.sum() == numbers.size
    return float(slices[0].nbytes / min(seconds))


def line(batch: int, case: Case, timing: Timing, roof: float) -> str:
    library = "–" if timing.library is None else f"{timing.library / timing.ours:.2f} ×"
    rate = case.weight_bytes / timing.ours
    speed = f"{rate / 1e9:6.1f} | {rate / roof:4.0%}" if case.weight_bytes else "– | –"
    return (
        f"| {batch} | {case.name} | {timing.ours * 1e6:.1f} "
        f"| {timing.reference / timing.ours:.2f} × | {library} | {speed} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    roof = read_bytes_per_second(options.rounds)
    print(f"{num_threads()} threads read {roof / 1e9:.1f} GB/s\n")
    print("| B | operation | cpu µs | reference ÷ cpu | library ÷ cpu | GB/s | of reading |")
    print("|---|---|---|---|---|---|---|")
    for batch in options.batches:
        for case in cases(batch):
            print(line(batch, case, measure(case, options.rounds), roof), flush=True)


if __name__ == "__main__":
    main()
