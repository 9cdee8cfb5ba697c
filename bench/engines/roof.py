"""What this machine could do in this very run: bytes read and multiply-adds made a second.

Neighbours: `floor` turns both into the least time of a step; `bench.kernels` measures reading.
"""

from __future__ import annotations

import time

import torch

from bench.engines.workload import Figure, Task, Tell
from bench.kernels import read_bytes_per_second

READS, PRODUCTS, SIDE, PRODUCT_SECONDS = 2, 8, 768, 2.0


def measure(task: Task, tell: Tell) -> None:
    torch.set_num_threads(task.threads)
    tell(Figure("roof", "read", read_bytes_per_second(READS) / 1e9, "GB/s"))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        tell(Figure("roof", f"product {name}", _product(dtype) / 1e9, "GFLOP/s"))


def _product(dtype: torch.dtype) -> float:
    """Operations a second of the library's square product, the fastest of a few that take 2 s."""
    a, b = torch.randn(2, SIDE, SIDE).to(dtype).unbind()
    seconds: list[float] = []
    while len(seconds) < PRODUCTS and sum(seconds) < PRODUCT_SECONDS:
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    return float(2 * SIDE**3 / min(seconds))
