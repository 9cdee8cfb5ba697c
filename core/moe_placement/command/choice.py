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
FLAGS = {
    "corpora": ("--corpus", "corpora"),
    "windows": ("--windows", "windows"),
    "window_tokens": ("--window-tokens", "token routing"),
    "num_experts": ("--experts", "token routing"),
}
"""Fields of `Choice`: the flag, and what a file must have for it."""


@dataclass(frozen=True)
class Choice:
    corpora: tuple[str, ...] = ()
    """Names of corpora, in the order wanted; ("all",) = every one; empty = the only one."""
    windows: slice | None = None
    """Windows of `window_tokens` tokens, or of the file; None = the whole file."""
    window_tokens: int | None = None
    num_experts: int | None = None
    """Of the model; token routing names only those that were chosen."""

    def only(self, flag: str, path: Path, *known: str) -> None:
        """Raise UsageError where something was chosen that a file does not have.

        Args:
            known: fields of `Choice` that make sense for the file.
        """
        for name, (chosen_by, what) in FLAGS.items():
            if name not in known and getattr(self, name):
                raise UsageError(f"{chosen_by}: {flag} {path} has no {what}: leave it out")

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
        if not found:
            raise UsageError(f"{flag}: {path} has no corpus: expected one beside its doc_lengths")
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
