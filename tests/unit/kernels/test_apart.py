"""Functions with machine code of their own: one copy, found by every caller, in any process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moe_kernels import implementation

pytestmark = pytest.mark.skipif("cpu" not in implementation.available(), reason="needs numba")


def test_callers_from_the_cache_find_it_and_compute_the_same_bits(tmp_path: Path) -> None:
    code = """
import torch
from moe_kernels import implementation
implementation.select("cpu")
from moe_kernels.linear import linear
from moe_kernels.cpu.linear import linear_product
generator = torch.Generator().manual_seed(1)
x, w = torch.randn(40, 100, generator=generator), torch.randn(9, 100, generator=generator)
for rows in (1, 5, 40):
    print(linear(x[:rows], w.bfloat16()).view(torch.int32).tolist())
print(sum(linear_product.stats.cache_hits.values()))
"""
    root = str(Path(implementation.__file__).parents[1])
    environment = {**os.environ, "MOE_KERNELS_CACHE": str(tmp_path), "PYTHONPATH": root}

    def run() -> list[str]:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    first, second = run(), run()
    assert first[-1] == "0"
    assert second == [*first[:-1], "1"]


def test_arrays_with_gaps_are_refused_where_the_caller_is_compiled() -> None:
    from numba.core.errors import TypingError

    from moe_kernels.cpu.product import multiply

    gaps = np.zeros((4, 8), np.float32)[:, ::2]
    whole = np.zeros((4, 4), np.float32)
    with pytest.raises(TypingError, match="C-contiguous"):
        multiply(gaps, 0, 0, 4, whole, 0, 4, whole)
