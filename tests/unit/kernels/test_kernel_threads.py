"""One setting for torch and the kernels, and loading kernels leaves it alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_kernels.cpu import jit


@pytest.mark.usefixtures("two_threads")
def test_kernels_take_torchs_number_as_far_as_there_are_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jit, "MOST_THREADS", 1)
    assert jit.num_threads() == 1
    monkeypatch.undo()
    assert jit.num_threads() == min(2, jit.MOST_THREADS)
    torch.set_num_threads(1)
    assert jit.num_threads() == 1


def test_loading_kernels_leaves_torchs_setting_alone() -> None:
    """numba starts its pool with as many threads as there are cores, in the same OpenMP."""
    code = "\n".join(
        [
            "import torch",
            "torch.set_num_threads(1)",
            "from moe_kernels.cpu import jit",
            "print(torch.get_num_threads(), jit.num_threads())",
        ]
    )
    root = Path(jit.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert done.stdout.split() == ["1", "1"], done.stderr
