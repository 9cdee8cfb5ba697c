"""Numbers of the shapes that keys and values have, drawn alike in every run."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS, DIM = 2**14, 128
LARGE_CHANNELS = {7: 12.0, 40: 18.0, 77: 24.0, 101: 30.0}
"""Channel and its standard deviation, in the sample with large channels."""


def gaussian(rows: int = ROWS, dim: int = DIM, std: float = 1.0) -> Tensor:
    return torch.randn(rows, dim, generator=_generator()) * std


def relative_error(x: Tensor, y: Tensor) -> float:
    return float((y.double() - x.double()).norm() / x.double().norm())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _laplace() -> Tensor:
    uniform = torch.rand(ROWS, DIM, generator=_generator(), dtype=torch.float64) - 0.5
    return (-uniform.sign() * torch.log1p(-2 * uniform.abs())).float()


def _student(freedom: int = 4) -> Tensor:
    generator = _generator()
    squares = torch.randn(freedom, ROWS, DIM, generator=generator).square().sum(0)
    return torch.randn(ROWS, DIM, generator=generator) / (squares / freedom).sqrt()


def _large_channels() -> Tensor:
    x = gaussian()
    for channel, std in LARGE_CHANNELS.items():
        x[:, channel] *= std
    return x


SAMPLES = {
    "gaussian": gaussian(),
    "laplace": _laplace(),
    "student": _student(),
    "uniform": torch.rand(ROWS, DIM, generator=_generator()) * 2 - 1,
    "four channels": _large_channels(),
}
