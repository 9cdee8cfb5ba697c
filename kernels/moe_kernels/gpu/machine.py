"""What there is to tell about this machine's GPU.

Neighbour: `moe_kernels.implementation` logs it.
"""

from __future__ import annotations

import torch
import triton

from moe_kernels.gpu.jit import IS_INTERPRETED


def description() -> str:
    where = "interpreted, for tests only" if IS_INTERPRETED else torch.cuda.get_device_name()
    return f"triton {triton.__version__}, {where}"
