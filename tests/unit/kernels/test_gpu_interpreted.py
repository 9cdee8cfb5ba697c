"""Without a GPU: its kernels in Triton's interpreter, and compiled for one that is not there.

Both in processes of their own, as Triton is told at its first import, and its driver replaced. The
interpreted ones are the same tests, fewer of them: some of each kind for each kernel. All of them
take ten minutes: `TRITON_INTERPRET=1 pytest -m gpu tests/unit/kernels`.
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
    "linear": "any_company_any_place or few_outputs and 22 and 17 or nan and dtype1 or ties",
    "grouped_gemm": "odd_addresses or past_the_last or any_crowd or 17 and dtype1",
    "activation": "its_formula or biases or extremes or either_half",
    "norm_rope": "its_formula or any_company or past_the_rotated or its_pair or no_rows",
    "permute": "order_is or c03",
    "append_implementations": "known_bytes or midpoints or k8v4 and four or latents and nvfp4"
    " or anyhow or refused",
    "gpu_split": "cutting",
    "sampling": "not_depend_on_the_batch or same_token or no_rows or refused and 1.0-nan",
    "attention_implementations": "bit_equal or agrees_with_the_oracle or no_tokens or refused",
}
"""By file: what is run of it."""

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: -m gpu runs them all"),
]


def test_interpreted_kernels_agree_with_the_oracle() -> None:
    files = [f"tests/unit/kernels/test_{name}.py" for name in CHOICE]
    wanted = " or ".join(f"test_{name}.py and ({words})" for name, words in CHOICE.items())
    done = run_alone(["-m", "pytest", "-q", "-m", "gpu", "-k", wanted, *files], "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def test_kernels_compile_for_a_gpu_that_is_not_here_and_none_is_left_for_a_step() -> None:
    """What the interpreter takes may be no Triton: compiling finds that."""
    done = run_alone(["-m", "tests.support.hopper_compiler"], "0")
    assert done.returncode == 0, done.stdout + done.stderr
    *compiled, left = done.stdout.splitlines()
    assert {line.split()[0] for line in compiled} == {
        "multiply", "up_tiles", "down_tiles", "gate_elements", "norm_rows", "turn_rows",
        "count_pairs", "place_pairs", "encode_vectors", "attend_units", "merge_parts",
        "draw_tokens",
    }  # fmt: skip
    assert left == "left"


def run_alone(arguments: list[str], interpreted: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "core", "worker", "kernels"))
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": interpreted}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=290,
    )  # fmt: skip
