"""Every implementation of the kernels that this machine can run, one after the other.

A test file about a contract says `pytestmark = pytest.mark.usefixtures("implementation")`; each of
its tests then runs once for each. `gpu` runs on a GPU, or where TRITON_INTERPRET=1 asks for it in
Triton's interpreter, a hundred times slower: `test_gpu_interpreted` does so for a choice of tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from moe_kernels import implementation as switch
from tests.support import gpu_carry


def _marked(name: switch.Name) -> Any:
    return pytest.param(name, marks=pytest.mark.gpu if name == "gpu" else ())


@pytest.fixture(scope="module", params=[_marked(name) for name in switch.available()])
def implementation(request: pytest.FixtureRequest) -> Iterator[switch.Name]:
    name: switch.Name = request.param
    if name == "gpu" and not switch.is_interpreted():
        gpu_carry.carry_operands()
    # The interpreter's numbers are numpy's, which warns where a GPU computes an infinity.
    with switch.using(name), np.errstate(all="ignore"):
        yield name


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels and torch share work among two threads, even where the suite asks for one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
