"""A recorded series of loads, window after window, for `replay`.

Read from token routing, [windows, layers, experts] arrays, expert counts (each corpus is a window)
and LoadReports (each interval is one). Neighbours: `load_files` reads the same files as one load.

Shapes: W windows, L MoE layers, E logical experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moe_placement.command import arrays, load_files, load_reports, texts, token_routing
from moe_placement.command.choice import Choice, WindowsWLE
from moe_placement.command.load_files import Load
from moe_placement.command.usage import UsageError

FLAG = "TRACE"


def read_trace(path: Path, choice: Choice, rounds: int = 1) -> WindowsWLE:
    """Loads [W, L, E] of a trace, gone through `rounds` times.

    Raises:
        UsageError: the file can not be read, or has a single window: there is nothing to replay.
    """
    windows_WLE = choice.cut(FLAG, path, _windows(path, choice))
    for window_LE in windows_WLE:
        load_files.checked(FLAG, path, window_LE)
    out = np.tile(windows_WLE, (rounds, 1, 1))
    if len(out) < 2:
        raise UsageError(
            f"{FLAG}: {path} has one window, a replay needs two or more: give --window-tokens for "
            "token routing, or a [windows, layers, experts] array"
        )
    return out


def _windows(path: Path, choice: Choice) -> WindowsWLE:
    if path.suffix == ".npy":
        choice.only(FLAG, path, "windows")
        return _of_array(path, arrays.read_npy(FLAG, path))
    if path.suffix == ".npz":
        found = arrays.read_npz(FLAG, path)
        if token_routing.is_routing(found):
            return token_routing.windows(FLAG, path, found, choice)
        choice.only(FLAG, path, "windows")
        return _of_array(path, arrays.pick(FLAG, path, found, *load_files.KEYS))
    if path.suffix in texts.SUFFIXES:
        return _of_document(path, texts.read_text(FLAG, path), choice)
    raise load_files.unknown_suffix(FLAG, path)


def _of_array(path: Path, array: arrays.Array) -> WindowsWLE:
    if array.ndim != 3:
        raise UsageError(
            f"{FLAG}: {path} has shape {array.shape}: expected [windows, layers, experts]"
        )
    return np.asarray(array, dtype=np.float64)


def _of_document(path: Path, document: Any, choice: Choice) -> WindowsWLE:
    reports = load_reports.find(FLAG, path, document)
    if reports is not None:
        choice.only(FLAG, path, "windows")
        rows = load_reports.intervals(reports)
        loads: list[Load] | None = [load_files.of_rows(FLAG, path, window) for window in rows]
    else:
        choice.only(FLAG, path, "windows", "corpora")
        loads = load_files.corpora(FLAG, path, document, choice)
    if not loads:
        raise UsageError(
            f"{FLAG}: {path} holds no series of loads: expected several LoadReports of each "
            "member, or counts of several corpora"
        )
    return np.stack([load.load_LE for load in loads])
