"""Compile the kernels ahead, into the folder that later starts load them from.

For images and for folders that pods share: a worker that finds its kernels there is ready seconds
after its start, without the half minute and more of compiling. The folder is MOE_KERNELS_CACHE,
else NUMBA_CACHE_DIR, else ~/.cache/moe-kernels. Kernels fit the kind of processor that they were
compiled on; elsewhere a worker compiles at its start.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

_SEVERAL_THREADS = "2"
"""Kernels for several threads are compiled too, wherever this runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR",
        help="only what this model needs (default: what any model needs)",
    )  # fmt: skip


def run(parsed: argparse.Namespace) -> int:
    """Compile what is missing. 0: all is there; 1: the folder cannot be written; 2: the model
    cannot be read, or no kernels can be compiled here."""
    os.environ.setdefault("NUMBA_NUM_THREADS", _SEVERAL_THREADS)
    import torch

    from moe_kernels import implementation
    from moe_kernels.implementation import ImplementationUnavailable
    from moe_kernels.warm_up import EVERY_NEED, Needs, warm_up
    from moe_worker.engine.kernel_needs import kernel_needs
    from moe_worker.model.config import ModelHasNoExperts, ModelUnreadable, load_architecture

    torch.set_num_threads(int(_SEVERAL_THREADS))
    needs: tuple[Needs, ...] = EVERY_NEED
    try:
        if parsed.model is not None:
            needs = (kernel_needs(load_architecture(parsed.model)),)
        implementation.select("cpu")
    except (ImplementationUnavailable, ModelUnreadable, ModelHasNoExperts) as error:
        return _refused(str(error), 2)
    from moe_kernels.cpu.cache import wanted_folder
    from moe_kernels.cpu.jit import CACHE_FOLDER

    wanted = wanted_folder(os.environ)
    if CACHE_FOLDER is None or CACHE_FOLDER.parent != wanted:
        return _refused(f"{wanted} cannot be written, set MOE_KERNELS_CACHE to a folder", 1)
    print(implementation.description(), flush=True)
    seconds = sum(warm_up(need, _show) for need in needs)
    size = sum(file.stat().st_size for file in CACHE_FOLDER.rglob("*") if file.is_file())
    print(f"ready after {seconds:.1f} s: {size / 1e6:.1f} MB in {CACHE_FOLDER}")
    return 0


def _show(done: int, total: int, name: str, seconds: float) -> None:
    print(f"{done:3} of {total}  {seconds:6.1f} s  {name}", flush=True)


def _refused(why: str, exit_code: int) -> int:
    print(f"moe-worker warm-up: {why}", file=sys.stderr)
    return exit_code
