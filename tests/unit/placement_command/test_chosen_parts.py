"""Flags that choose a part of a file are refused where the file has no such part, never ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.moe_plan import moe_plan, refused

RANKS = ("--ranks", 2, "--slots-per-rank", 4)
FLAGS = {
    "--corpus": "law",
    "--windows": "0:2",
    "--window-tokens": "2",
    "--experts": "4",
}
REPORT = {
    "schema": 1, "incarnation": "a", "member": 0, "generation": 1, "epoch": 1,
    "monotonicSeconds": 0, "routed": [[1, 2]], "served": [[0]],
}  # fmt: skip
KNOWN: dict[str, tuple[Any, set[str]]] = {
    "matrix.npy": (np.ones((2, 4)), set()),
    "windows.npy": (np.ones((3, 2, 4)), {"--windows"}),
    "rows.json": ([[1, 2]], set()),
    "counts.json": ({"counts": {"law": [[1, 2]], "code": [[2, 1]]}}, {"--corpus"}),
    "reports.json": ([REPORT, {**REPORT, "routed": [[3, 4]]}], set()),
}
CASES = [(name, flag) for name in KNOWN for flag in FLAGS]


def saved(folder: Path, name: str) -> Path:
    content = KNOWN[name][0]
    if name.endswith(".npy"):
        np.save(folder / name, content)
    else:
        (folder / name).write_text(json.dumps(content))
    return folder / name


@pytest.mark.parametrize(("name", "flag"), CASES)
def test_a_load(tmp_path: Path, name: str, flag: str) -> None:
    done = moe_plan("plan", "--load", saved(tmp_path, name), *RANKS, flag, FLAGS[flag])
    if flag in KNOWN[name][1]:
        assert done.code == 0
    else:
        assert done.code == 2
        if name not in ("windows.npy", "counts.json"):  # those ask for a choice first
            refused(done, flag, "leave it out")


@pytest.mark.parametrize(("name", "flag"), CASES)
def test_a_trace_can_be_cut_into_windows_whatever_it_is(
    tmp_path: Path, name: str, flag: str
) -> None:
    if flag == "--windows" or flag in KNOWN[name][1] or name in ("matrix.npy", "rows.json"):
        return
    done = moe_plan("replay", saved(tmp_path, name), *RANKS, flag, FLAGS[flag])
    refused(done, flag, "leave it out")
