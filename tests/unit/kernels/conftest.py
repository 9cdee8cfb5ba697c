"""Every implementation of the kernels that this machine can run, one after the other.

A test file about a contract says `pytestmark = pytest.mark.usefixtures("implementation")`; each of
its tests then runs once for each.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moe_kernels import implementation as switch


@pytest.fixture(scope="module", params=switch.available())
def implementation(request: pytest.FixtureRequest) -> Iterator[switch.Name]:
    name: switch.Name = request.param
    with switch.using(name):
        yield name


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Kernels and torch share work among two threads, even where the suite asks for one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
