"""How long a process compiles before it can serve: with an empty cache, and with a filled one.

Each start is a process of its own, `python -m bench.engines.cold_start MODEL KERNELS THREADS`, that
prints the seconds of its warm-up. Neighbour: `ours` asks for both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.engines.workload import Figure, Task, Tell
from moe_kernels.cpu.cache import VARIABLE

START_SECONDS = 600.0


def measure_starts(task: Task, tell: Tell) -> None:
    with tempfile.TemporaryDirectory(prefix="kernels-") as folder:
        for variant in ("cold", "from cache"):
            tell(Figure("warm-up", variant, _start(task, Path(folder)), "s"))


def _start(task: Task, cache: Path) -> float:
    ended = subprocess.run(
        [sys.executable, "-m", __name__, task.model, task.kernels, str(task.threads)],
        env=os.environ | {VARIABLE: str(cache)}, capture_output=True, text=True, check=False,
        timeout=START_SECONDS,
    )  # fmt: skip
    if ended.returncode:
        raise RuntimeError(f"a start failed:\n{ended.stderr}")
    return float(ended.stdout.splitlines()[-1])


def main(model: str, kernels: str, threads: str) -> None:
    import torch

    from moe_kernels.implementation import select
    from moe_kernels.warm_up import warm_up
    from moe_worker.engine.kernel_needs import kernel_needs
    from moe_worker.model.config import load_architecture

    torch.set_num_threads(int(threads))
    select(kernels, "cpu")
    print(warm_up(kernel_needs(load_architecture(Path(model))), lambda *_: None))


if __name__ == "__main__":
    main(*sys.argv[1:])
