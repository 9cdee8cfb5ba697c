"""The implementations of the kernels that serve on CPUs, one after the other.

A test file that holds for both says `pytestmark = pytest.mark.usefixtures("implementation")`; each
of its tests then runs once for each. A fixture of the module that computes asks for it, too: what
it gives would else be shared by all. The others run on the reference. Tests of the kernels alone
have a fixture of this name of their own, with every implementation.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_kernels import implementation as switch

ON_CPUS = [name for name in ("reference", "cpu") if name in switch.available()]


@pytest.fixture(scope="module", params=ON_CPUS)
def implementation(request: pytest.FixtureRequest) -> Iterator[switch.Name]:
    name: switch.Name = request.param
    with switch.using(name):
        yield name


@pytest.fixture(autouse=True)
def kernels_stay() -> Iterator[None]:
    """A test that starts a worker in this process chooses kernels for none but itself."""
    with switch.using(switch.chosen()):
        yield
