"""What quantising cost: a few tokens of a step compared with what is stored of them.

The cost is bounded: only when asked, once, and only some tokens. Nothing that attention reads
depends on it. Neighbours: `kv_pages` hands over the tokens, `moe_worker.engine.kv` asks one layer
after the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROBE_TOKENS = 8


@dataclass
class ErrorProbe:
    """Of one layer. Asked and written by the engine's thread, read by any."""

    wanted: bool = False
    """Look at the next tokens that are stored."""
    max_tokens: int = PROBE_TOKENS
    _newest: Tensor | None = None

    @property
    def relative_error(self) -> float | None:
        """Relative L2 error of the newest sample, the worst side's; None before the first, and
        where numbers are not finite."""
        newest = self._newest  # a tensor, so that a device need not be waited for when it is made
        if newest is None or not math.isfinite(error := float(newest)):
            return None
        return error

    def take(self, given: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        """Each side's tokens as given, and what a reader gets of the first of them."""
        errors = [_relative_l2(x[: len(y)], y) for x, y in zip(given, kept, strict=True)]
        self._newest = torch.stack(errors).amax()
        self.wanted = False


def _relative_l2(given: Tensor, kept: Tensor) -> Tensor:
    """‖kept − given‖ ÷ ‖given‖, 0 when both are zero."""
    size = given.norm()
    error = (kept - given).norm()
    return torch.where(size > 0, error / size, error)
