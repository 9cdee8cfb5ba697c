"""The kernels of GPUs beside what the machine can do: GB/s against a copy, TFLOP/s against cuBLAS.

    python bench/gpu.py [--seconds 180]

Shapes are those of Qwen3-30B-A3B: hidden 2048, 32 query heads of 128 on 4 of keys and values, 128
experts of 768, top-8. GB/s are the bytes that a call must move (weights, stored keys and values,
rows in and out), TFLOP/s its multiplications and additions; `of peak` is the larger of the shares
of what a copy and a cuBLAS product of 8192 squared reach here. `library` is torch's own call in
bfloat16, without a promise about a row's bits. Times are medians with the L2 cache emptied before
each call, launches included: small calls show what a launch costs. Sections that would begin after
the time is over are named and left out.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import implementation
from moe_kernels.activation import SILU, gated
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, allocate_pages, append
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_kernels.permute import sort_by_slot

HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2048, 32, 4, 128
EXPERTS, INTERMEDIATE, TOP_K, VOCABULARY = 128, 768, 8, 151_936
BLOCK_SIZE = 16
COPY_BYTES, SQUARE = 1 << 30, 8192
GB, TERA, MILLI = 1e9, 1e12, 1e-3

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    name: str
    call: Call
    num_bytes: float
    operations: float = 0.0
    library: Call | None = None


@dataclass(frozen=True)
class Peak:
    bytes_per_second: float
    operations_per_second: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="no section begins later")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU that torch can use: nothing is measured")
        return
    end = time.monotonic() + arguments.seconds
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    peak = measure_peak()
    print(
        f"copy {peak.bytes_per_second / GB:,.0f} GB/s (read and written), "
        f"cuBLAS bfloat16 {peak.operations_per_second / TERA:,.0f} TFLOP/s"
    )
    print(f"{'':34}{'µs':>10}{'GB/s':>9}{'TFLOP/s':>9}{'of peak':>9}{'library µs':>12}")
    with implementation.using("gpu"), torch.inference_mode():
        for section in (attention, experts, products, elements):
            if time.monotonic() >= end:
                print(f"{section.__name__}: left out, the time is over")
                continue
            for case in section():
                print(line(case, peak), flush=True)
            torch.cuda.empty_cache()


def measure_peak() -> Peak:
    source = torch.empty(COPY_BYTES, dtype=torch.uint8)
    to = torch.empty_like(source)
    a, b = (torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16) for _ in "ab")
    return Peak(
        2 * COPY_BYTES / seconds(lambda: to.copy_(source)),
        2 * SQUARE**3 / seconds(lambda: torch.mm(a, b)),
    )


def seconds(call: Call) -> float:
    # Only where there is a GPU, so that --help needs none.
    from triton.testing import do_bench

    return float(do_bench(call, warmup=20, rep=100, return_mode="median")) * MILLI


def line(case: Case, peak: Peak) -> str:
    took = seconds(case.call)
    share = max(
        case.num_bytes / took / peak.bytes_per_second,
        case.operations / took / peak.operations_per_second,
    )
    flops = f"{case.operations / took / TERA:9.1f}" if case.operations else " " * 9
    library = f"{seconds(case.library) * 1e6:12.1f}" if case.library else ""
    rate = case.num_bytes / took / GB
    return f"{case.name:34}{took * 1e6:10.1f}{rate:9,.0f}{flops}{share:9.0%}{library}"


def attention() -> Iterator[Case]:
    for name, sequences, tokens in [
        ("bf16", 16, 8192), ("fp8", 16, 8192), ("nvfp4", 16, 8192), ("mxfp4", 16, 8192),
        ("bf16", 1, 65536), ("nvfp4", 1, 65536), ("nvfp4", 64, 2048),
    ]:  # fmt: skip
        yield decode(name, sequences, tokens)
    yield prefill("nvfp4", 2048)
    yield stored(4096)


def decode(name: KvFormatName, sequences: int, tokens: int) -> Case:
    pages = filled_pages(name, sequences * tokens)
    blocks = tokens // BLOCK_SIZE
    plan = plan_attention(
        [
            AttentionRows(tokens - 1, 1, range(each * blocks, (each + 1) * blocks))
            for each in range(sequences)
        ],
        BLOCK_SIZE,
    )
    q = torch.randn(sequences, HEADS, HEAD_DIM)
    library: Call | None = None
    if name == "bf16":
        k, v = torch.randn(2, sequences, KV_HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16).unbind()
        q_one = q.to(torch.bfloat16)[:, :, None]
        library = lambda: F.scaled_dot_product_attention(q_one, k, v, enable_gqa=True)  # noqa: E731
    return Case(
        f"decode {sequences} × {tokens:,} {name}",
        lambda: paged_attention(q, pages, plan),
        pages.num_bytes,
        4.0 * sequences * HEADS * HEAD_DIM * tokens,
        library,
    )


def prefill(name: KvFormatName, tokens: int) -> Case:
    pages = filled_pages(name, tokens)
    plan = plan_attention([AttentionRows(0, tokens, range(tokens // BLOCK_SIZE))], BLOCK_SIZE)
    q = torch.randn(tokens, HEADS, HEAD_DIM)
    k, v = torch.randn(2, 1, KV_HEADS, tokens, HEAD_DIM, dtype=torch.bfloat16).unbind()
    q_one = q.to(torch.bfloat16).transpose(0, 1)[None].contiguous()
    return Case(
        f"prefill {tokens:,} {name}",
        lambda: paged_attention(q, pages, plan),
        pages.num_bytes + 2 * q.nbytes,
        2.0 * HEADS * HEAD_DIM * tokens**2,
        lambda: F.scaled_dot_product_attention(q_one, k, v, is_causal=True, enable_gqa=True),
    )


def filled_pages(name: KvFormatName, tokens: int) -> KvPages:
    shape = HeadsShape(KV_HEADS, HEAD_DIM)
    pages = allocate_pages(KvFormat(name), shape, tokens // BLOCK_SIZE, BLOCK_SIZE, "cuda")
    for start in range(0, tokens, 1 << 14):
        slots = torch.arange(start, min(start + (1 << 14), tokens))
        append(pages, *torch.randn(2, len(slots), KV_HEADS, HEAD_DIM).unbind(), slots)
    return pages


def stored(tokens: int) -> Case:
    pages = filled_pages("nvfp4", tokens)
    k, v = torch.randn(2, tokens, KV_HEADS, HEAD_DIM).unbind()
    slots = torch.randperm(tokens)
    return Case(
        f"append {tokens:,} nvfp4",
        lambda: append(pages, k, v, slots),
        pages.num_bytes + k.nbytes + v.nbytes,
    )


def experts() -> Iterator[Case]:
    w13 = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16) / INTERMEDIATE**0.5
    for tokens in (1, 4, 16, 64, 256, 4096):
        slots = torch.rand(tokens, EXPERTS).topk(TOP_K).indices
        order, offsets = sort_by_slot(slots, EXPERTS)
        rows = torch.randn(tokens, HIDDEN)[order // TOP_K]
        yield experts_case(tokens, rows, offsets, w13, w2)
    slots = torch.rand(4096, EXPERTS).topk(TOP_K).indices
    yield Case("sort 4,096 × 8", lambda: sort_by_slot(slots, EXPERTS), 2.0 * slots.nbytes)


def experts_case(tokens: int, rows: Tensor, offsets: Tensor, w13: Tensor, w2: Tensor) -> Case:
    touched = int((offsets.diff() > 0).sum())
    weights = w13[0].numel() + w2[0].numel()
    rounded, ends = rows.to(torch.bfloat16), offsets[1:].to(torch.int32)

    def library() -> Tensor:
        gate, up = F.grouped_mm(rounded, w13.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, w2.transpose(-2, -1), offs=ends)

    return Case(
        f"experts {tokens:,} tokens ({touched} touched)",
        lambda: expert_mlp(rows, offsets, w13, w2),
        2.0 * touched * weights + 2 * rows.nbytes,
        2.0 * len(rows) * weights,
        library,
    )


def products() -> Iterator[Case]:
    for outputs in (HEADS * HEAD_DIM, VOCABULARY):
        w = torch.randn(outputs, HIDDEN, dtype=torch.bfloat16)
        for rows in (1, 64, 2048):
            x = torch.randn(rows, HIDDEN)
            yield product_case(x, w)


def product_case(x: Tensor, w: Tensor) -> Case:
    rounded = x.to(w.dtype)
    return Case(
        f"linear {len(x):,} × {w.shape[0]:,}",
        lambda: linear(x, w),
        w.nbytes + x.nbytes + 4.0 * len(x) * len(w),
        2.0 * len(x) * w.numel(),
        lambda: F.linear(rounded, w),
    )


def elements() -> Iterator[Case]:
    tokens = 4096
    x, weight = torch.randn(tokens, HIDDEN), torch.ones(HIDDEN, dtype=torch.bfloat16)
    wide_weight = weight.float()
    yield Case(
        "rms norm 4,096", lambda: rms_norm(x, weight, 1e-6), 2.0 * x.nbytes, 0.0,
        lambda: F.rms_norm(x, (HIDDEN,), wide_weight, 1e-6),
    )  # fmt: skip
    heads, angles = torch.randn(tokens, HEADS, HEAD_DIM), torch.randn(tokens, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    yield Case("rope 4,096", lambda: rope(heads, cos, sin), 2.0 * heads.nbytes)
    both = torch.randn(tokens, 2 * INTERMEDIATE)
    yield Case("silu 4,096", lambda: gated(both, SILU), 1.5 * both.nbytes)


if __name__ == "__main__":
    main()
