"""How every kernel here is compiled and gets its threads; the only user of numba's decorator.

Rules for a kernel, each found the hard way:
* A function at module level with a name of its own. numba's cache tells functions apart by file,
  line and bytecode; of two closures of one source it would load the wrong one.
* `compiled` for the work, `inner` for its parts; `parallel` only for a function whose `prange`
  bodies are single calls of compiled ones. Code inside a prange body is not vectorised, and its
  index is unsigned: pass `np.int64(index)`.
* No fastmath anywhere: it reassociates sums, and a row's bits would depend on its batch. Sums that
  must be fast name their lanes, see `intrinsics`; element-wise loops vectorise without it.

Threads: `num_threads()` is torch's number, so one setting rules both. A kernel gets it as an
argument, cuts its work into so many parts, and with one thread enters no parallel region at all.
OpenMP is the layer that is quick to enter (2 µs); without its library numba falls back to its work
queue (100 µs, one caller at a time), and then kernels stay on one thread.
A process that has run a parallel kernel must not fork: OpenMP does not survive it. Spawn.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
import torch
from numpy.typing import NDArray

from moe_kernels.cpu.cache import cache_folder

F = TypeVar("F", bound=Callable[..., Any])
Array = NDArray[Any]
Index = int | np.int64

log = logging.getLogger(__name__)

_VERSIONS = f"numba {numba.__version__} llvmlite {llvmlite.__version__}"
CACHE_FOLDER = cache_folder(os.environ, Path(__file__).parent, _VERSIONS)
if CACHE_FOLDER is not None:
    numba.config.CACHE_DIR = str(CACHE_FOLDER)
numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "cache": CACHE_FOLDER is not None,
}
_of_this_thread = threading.local()


def compiled(function: F) -> F:
    """A kernel for one thread."""
    return cast("F", numba.njit(**_OPTIONS)(function))


def inner(function: F) -> F:
    """A part of kernels: not to be called from Python, and compiled sooner for it."""
    return cast(
        "F", numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    )


def parallel(function: F) -> F:
    """A kernel whose `prange` loops run on several threads."""
    return cast("F", numba.njit(parallel=True, **_OPTIONS)(function))


def num_threads() -> int:
    """Threads that a kernel called from this thread shall use: torch's number, as far as it goes.

    To be asked before each call: numba's own setting belongs to the calling thread.
    """
    wanted = min(torch.get_num_threads(), MOST_THREADS)
    if wanted > 1 and getattr(_of_this_thread, "num_threads", None) != wanted:
        numba.set_num_threads(wanted)
        _of_this_thread.num_threads = wanted
    return wanted


def _start_threads() -> int:
    """Start numba's pool; the number of its threads, 1 where it has to do without OpenMP."""
    try:
        import_module("numba.np.ufunc.omppool")
    except ImportError as error:
        log.warning("kernels: one thread only, OpenMP (libgomp1) cannot be loaded: %s", error)
        return 1
    # The start sets OpenMP's number of threads, which is torch's too.
    before = torch.get_num_threads()
    parallel_pool: Any = import_module("numba.np.ufunc.parallel")
    parallel_pool._launch_threads()
    torch.set_num_threads(before)
    return int(numba.config.NUMBA_NUM_THREADS)


MOST_THREADS = _start_threads()
