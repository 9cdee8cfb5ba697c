"""Without a GPU: its kernels in Triton's interpreter, and compiled for one that is not there.

Both in processes of their own, as Triton is told at its first import, and its driver replaced. The
interpreted ones are the same tests, fewer of them: one of each kind for each kernel, small shapes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
CHOICE = {
    "linear": "any_company_any_place or summed_in_float32 and dtype1 or few_outputs and 22 and 17"
    " or not_finite and dtype1 or every_pattern or ties or any_number",
    "grouped_gemm": "odd_addresses or past_the_last or any_crowd or [16 or not_finite and dtype1",
    "activation": "formula or biases or extremes or either_half",
    "norm_rope": "norm or past_the_rotated or its_pair or no_rows",
    "permute": "order_is or c03",
    "append_implementations": "known_bytes or midpoints or bytes_are or anyhow or refused or k8v4",
    "attention_implementations": "bit_equal or agrees or no_tokens or a_nan or refused",
}
"""By file: what is run of it."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: -m gpu runs them all"),
]


@pytest.mark.parametrize("file", CHOICE)
def test_interpreted_kernels_agree_with_the_oracle(file: str) -> None:
    done = run_alone(
        ["-m", "pytest", "-q", "-m", "gpu", "-k", CHOICE[file],
         f"tests/unit/kernels/test_{file}.py"],
        TRITON_INTERPRET="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def run_alone(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "core", "worker", "kernels"))
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=280,
    )  # fmt: skip
