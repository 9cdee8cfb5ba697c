"""Four bits as float32: by the processor's table of bytes and without it, the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import e2m1, implementation

pytestmark = pytest.mark.skipif(
    "cpu" not in implementation.available(), reason="numba is not installed"
)
EVERY_PAIR = torch.arange(256, dtype=torch.uint8).view(16, 16)


def decoder() -> Callable[[Tensor], Tensor]:
    """Of sixteen bytes by the kernels' own operation, the second sixteen numbers times two."""
    import numba
    import numpy as np

    from moe_kernels.cpu.lanes import store
    from moe_kernels.cpu.small_floats import load_e2m1

    take: Any = load_e2m1
    put: Any = store

    @numba.njit  # type: ignore[untyped-decorator]
    def run(data: Any, target: Any, first: Any, second: Any) -> None:
        a, b, c, d = take(data, np.int64(0), first, second)
        put(target, np.int64(0), a)
        put(target, np.int64(32), b)
        put(target, np.int64(64), c)
        put(target, np.int64(96), d)

    def decode(stored: Tensor) -> Tensor:
        target = np.zeros(128, dtype=np.uint8)
        run(stored.numpy(), target, np.float32(2.0**14), np.float32(2.0**15))
        return torch.from_numpy(target.view(np.float32))

    return decode


@pytest.fixture(params=["table", "halves"])
def decoded(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Tensor], Tensor]:
    from moe_kernels.cpu import small_floats

    if request.param == "table" and not small_floats.HAS_BYTE_TABLE:
        pytest.skip("this processor has no table of bytes")
    monkeypatch.setattr(small_floats, "HAS_BYTE_TABLE", request.param == "table")
    return decoder()


def test_every_pair_of_codes_is_its_numbers(decoded: Callable[[Tensor], Tensor]) -> None:
    for stored in EVERY_PAIR:
        expected = e2m1.unpacked_values(stored) * torch.ones(32).index_fill(
            0, torch.arange(16, 32), 2.0
        )
        found = decoded(stored)
        # Zeros keep their sign, so bits are compared.
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
