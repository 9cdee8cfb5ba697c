"""How every kernel here is compiled; the only user of numba's decorator.

Rules for a kernel, each found the hard way:
* A function at module level with a name of its own. numba's cache tells functions apart by file,
  line and bytecode; of two closures of one source it would load the wrong one.
* `compiled` for the work, `inner` for its parts. Several threads call it by `team.together`.
* No fastmath anywhere: it reassociates sums, and a row's bits would depend on its batch. Sums that
  must be fast name their lanes, see `intrinsics`; element-wise loops vectorise without it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import llvmlite
import numba
import numpy as np
from numpy.typing import NDArray

from moe_kernels.cpu.cache import cache_folder

F = TypeVar("F", bound=Callable[..., Any])
Array = NDArray[Any]
Index = int | np.int64

_VERSIONS = f"numba {numba.__version__} llvmlite {llvmlite.__version__}"
CACHE_FOLDER = cache_folder(os.environ, Path(__file__).parent, _VERSIONS)
if CACHE_FOLDER is not None:
    numba.config.CACHE_DIR = str(CACHE_FOLDER)

_OPTIONS = {
    "nogil": True,
    "error_model": "numpy",
    "boundscheck": False,
    "cache": CACHE_FOLDER is not None,
}


def compiled(function: F) -> F:
    """A kernel for one thread."""
    return cast("F", numba.njit(**_OPTIONS)(function))


def inner(function: F) -> F:
    """A part of kernels: not to be called from Python, and compiled sooner for it."""
    return cast(
        "F", numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
    )
