"""What this machine gives the kernels, in words for the log.

The kernels' vectors are eight float32, written for no processor (`lanes`, `intrinsics`): what the
processor has decides how many instructions they become, and never their numbers.
Neighbour: `moe_kernels.implementation.description` asks.
"""

from __future__ import annotations

from collections.abc import Mapping

import llvmlite.binding

from moe_kernels.cpu.jit import CACHE_FOLDER
from moe_kernels.cpu.team import num_threads


def description() -> str:
    """Threads, vectors and the folder of compiled kernels."""
    threads, processor = num_threads(), llvmlite.binding.get_host_cpu_name()
    return "; ".join(
        [
            f"{threads} thread{'s' if threads > 1 else ''} on {processor}",
            vectors(llvmlite.binding.get_host_cpu_features()),
            f"cache in {CACHE_FOLDER}" if CACHE_FOLDER else "no cache",
        ]
    )


def vectors(features: Mapping[str, bool]) -> str:
    """Which vector instructions there are, by the processor's features as LLVM names them."""
    if features.get("avx512f"):
        return "AVX-512"
    if features.get("avx2") and features.get("fma"):
        return "no AVX-512: the plain vector kernels run, with AVX2 and FMA"
    if features.get("neon"):
        return "no AVX-512: the plain vector kernels run, with NEON"
    return "neither AVX-512 nor AVX2 with FMA: the plain vector kernels run, slowly"
