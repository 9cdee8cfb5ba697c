"""Compile the GPU's kernels for a Hopper GPU that is not there: launches end at the cubin.

The launchers run as they are, on CPU tensors: types and alignments of arguments are those of a real
step. Nothing is computed. Only for a process of its own: Triton's driver stays replaced. Run as a
program it warms up, prints each kernel with what a thread keeps, and names what a step still had to
compile.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from moe_kernels import implementation
from moe_kernels.activation import SILU, gated
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import allocate_pages, append
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_kernels.permute import sort_by_slot
from moe_kernels.sampling import Cut, sample
from moe_kernels.warm_up import Needs, Shapes, warm_up

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


NEEDS = Needs(
    frozenset({torch.bfloat16, torch.float32}),
    shapes=Shapes(256, 128, 16, 64, KvFormat("nvfp4"), HeadsShape(2, 128), 16),
)


def a_step(tokens: int, past: int) -> None:
    """All operations of a layer, with the shapes of NEEDS."""
    assert NEEDS.shapes is not None
    hidden, inner = NEEDS.shapes.hidden, NEEDS.shapes.intermediate
    x, w = torch.zeros(tokens, hidden), torch.zeros(40, 2 * inner, hidden, dtype=torch.bfloat16)
    linear(rms_norm(x, w[0, 0], 1e-6), w[0])
    slots = torch.arange(tokens)[:, None]
    _, offsets = sort_by_slot(slots % 40, 40)
    expert_mlp(x, offsets, w, torch.zeros(40, hidden, inner, dtype=torch.bfloat16))
    q, kv = torch.zeros(tokens, 16, 128), torch.zeros(tokens, 2, 128)
    angles = torch.zeros(tokens, 64)
    pages = allocate_pages(NEEDS.shapes.kv_format, NEEDS.shapes.kv_shape, 300, 16)
    append(pages, rope(kv, angles, angles), kv, torch.arange(tokens))
    plan = plan_attention([AttentionRows(past, tokens, range(300))], 16)
    paged_attention(rope(q, angles, angles), pages, plan)
    rms_norm(q.view(-1, 128), w[0, 0, :128], 1e-6)
    gated(torch.zeros(tokens, 2 * inner), SILU)
    sample(torch.zeros(tokens, 1000), [Cut(1.0)] * tokens, [0] * tokens, [0] * tokens)


if __name__ == "__main__":
    kernels = compile_only()
    implementation._chosen = "gpu"  # which could not be selected where there is none
    warm_up(NEEDS, lambda *progress: None)
    for kernel in kernels:
        print(kernel.name, kernel.registers, kernel.spilled_bytes, kernel.shared_bytes)
    num_ready = len(kernels)
    a_step(1, 4000)
    a_step(67, 30)
    print("left", *(kernel.name for kernel in kernels[num_ready:]))
