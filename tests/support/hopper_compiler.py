"""Compile the GPU's kernels for a Hopper GPU that is not there: launches end at the cubin.

The launchers run as they are, on CPU tensors: types and alignments of arguments are those of a real
step. Nothing is computed. Only for a process of its own: Triton's driver stays replaced.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

H200 = GPUTarget("cuda", 90, 32)


class _NoDriver:
    """What a launch asks of a driver before it has a binary."""

    def get_current_target(self) -> GPUTarget:
        return H200

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    name: str
    ptx: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    """Of a thread, to local memory."""


def compile_only() -> list[Compiled]:
    """From now on a launch compiles and nothing more; the list grows with each new kernel."""
    done: list[Compiled] = []
    seen: set[str] = set()
    run = JITFunction.run

    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in seen:
            seen.add(kernel.hash)
            registers, spilled = _usage(kernel.asm["cubin"])
            shared = int(kernel.metadata.shared)
            done.append(Compiled(kernel.name, kernel.asm["ptx"], shared, registers, spilled))
        return kernel

    triton.runtime.driver.set_active(_NoDriver())
    JITFunction.run = compiled
    return done


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, bytes of its stack."""
    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run(
            [str(program), "--dump-resource-usage", str(path)],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
    numbers = dict(
        word.split(":", 1) for word in told.split() if word.startswith(("REG:", "STACK:"))
    )
    return int(numbers["REG"]), int(numbers["STACK"])
