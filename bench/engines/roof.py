"""What this machine could do in this very run: bytes read and multiply-adds made a second.

Neighbours: `floor` turns both into the least time of a step; `bench.kernels` measures reading.
"""

from __future__ import annotations

import time

import torch

from bench.engines.workload import Figure, Task, Tell
from bench.kernels import read_bytes_per_second

READS, PRODUCTS, PRODUCT_SECONDS = 2, 8, 2.0
SIDES = (("fp32", torch.float32, 1024), ("bf16", torch.bfloat16, 384))
"""Of square products; without AVX-512 those of BF16 take a hundred times as long."""


def measure(task: Task, tell: Tell) -> None:
    torch.set_num_threads(task.threads)
    tell(Figure("roof", "read", read_bytes_per_second(READS) / 1e9, "GB/s"))
    for name, dtype, side in SIDES:
        tell(Figure("roof", f"product {name}", _product(dtype, side) / 1e9, "GFLOP/s"))


def _product(dtype: torch.dtype, side: int) -> float:
    """Operations a second of the library's square product, the fastest of a few that take 2 s."""
    a, b = torch.randn(2, side, side).to(dtype).unbind()
    seconds: list[float] = []
    while len(seconds) < PRODUCTS and sum(seconds) < PRODUCT_SECONDS:
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return float(2 * side**3 / min(seconds))
