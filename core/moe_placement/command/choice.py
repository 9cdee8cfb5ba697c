"""Which part of a file is meant, where it holds more than one load: corpora and windows.

Neighbours: `arguments` makes a `Choice` out of flags; `load_files` and `trace_files` ask it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moe_placement.command.usage import UsageError

WindowsWLE = npt.NDArray[np.float64]

ALL = "all"


@dataclass(frozen=True)
class Choice:
    corpora: tuple[str, ...] = ()
    """Names of corpora, in the order wanted; ("all",) = every one; empty = the only one."""
    windows: slice | None = None
    """Windows of `window_tokens` tokens, or of the file; None = the whole file."""
    window_tokens: int | None = None
    num_experts: int | None = None
    """Of the model; token routing names only those that were chosen."""

    def names(self, flag: str, path: Path, found: Sequence[str]) -> list[str]:
        """The chosen ones among the corpora of a file.

        Raises:
            UsageError: one is not there, or there are several and none was chosen.
        """
        if self.corpora == (ALL,) or (not self.corpora and len(found) == 1):
            return list(found)
        unknown = [name for name in self.corpora if name not in found]
        if not unknown and self.corpora:
            return list(self.corpora)
        problem = f"has no corpus {unknown[0]!r}" if unknown else f"holds {len(found)} corpora"
        raise UsageError(
            f"{flag}: {path} {problem}: choose with --corpus: {', '.join(found)}, or {ALL}"
        )

    def cut(self, flag: str, path: Path, windows_WLE: WindowsWLE) -> WindowsWLE:
        """The chosen windows.

        Raises:
            UsageError: none of them is there.
        """
        out = windows_WLE[self.windows or slice(None)]
        if not len(out):
            raise UsageError(
                f"--windows: {flag} {path} has windows 0 to {len(windows_WLE) - 1}, "
                "none of them is chosen"
            )
        return out
