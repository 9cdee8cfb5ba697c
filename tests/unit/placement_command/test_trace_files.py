"""Series of loads for a replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_placement.command.choice import Choice
from moe_placement.command.trace_files import read_trace
from moe_placement.command.usage import UsageError

ANY = Choice()


def report(member: int, routed: list[list[int]], incarnation: str = "a") -> dict[str, Any]:
    return {
        "schema": 1, "incarnation": incarnation, "member": member, "generation": 1, "epoch": 1,
        "monotonicSeconds": 1, "routed": routed, "served": [],
    }  # fmt: skip


def lines(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, documents)))
    return path


def test_windows_of_an_array(tmp_path: Path) -> None:
    windows = np.arange(24.0).reshape(4, 2, 3)
    np.save(tmp_path / "t.npy", windows)
    assert np.array_equal(read_trace(tmp_path / "t.npy", ANY), windows)
    chosen = read_trace(tmp_path / "t.npy", Choice(windows=slice(1, 3)), rounds=2)
    assert np.array_equal(chosen, windows[[1, 2, 1, 2]])


def test_windows_of_token_routing_corpus_after_corpus(tmp_path: Path) -> None:
    law = np.array([[[0, 1]], [[0, 1]], [[1, 2]], [[1, 2]], [[0, 2]]])
    np.savez(tmp_path / "t.npz", law=law, law_doc_lengths=[5], code=law[2:4], code_doc_lengths=[2])
    choice = Choice(("code", "law"), window_tokens=2)
    trace = read_trace(tmp_path / "t.npz", choice)
    assert trace[:, 0].tolist() == [[0, 2, 2], [2, 2, 0], [0, 2, 2]]


def test_each_corpus_of_counts_is_a_window(tmp_path: Path) -> None:
    document = {"counts": {"a": [[1, 2]], "b": [[3, 4]]}}
    (tmp_path / "t.json").write_text(json.dumps(document))
    assert read_trace(tmp_path / "t.json", Choice(("all",))).tolist() == [[[1, 2]], [[3, 4]]]


def test_windows_between_reports_count_restarts_in_full(tmp_path: Path) -> None:
    reports = [
        report(0, [[5, 5]]), report(1, [[1, 0]]),
        report(0, [[7, 5]]), report(1, [[3, 1]], incarnation="b"),
        report(0, [[7, 9]]), report(1, [[3, 1]], incarnation="b"),
        report(0, [[8, 9]]),
    ]  # fmt: skip
    trace = read_trace(lines(tmp_path / "t.jsonl", reports), ANY)
    assert trace.tolist() == [[[5, 1]], [[0, 4]]]


@pytest.mark.parametrize(
    ("name", "array", "words"),
    [
        ("one.npy", np.ones((1, 2, 2)), "one window, a replay needs two"),
        ("flat.npy", np.ones((2, 2)), "[windows, layers, experts]"),
        ("nan.npy", np.full((2, 2, 2), np.nan), "layer 0, expert 0 is nan"),
        ("negative.npy", -np.ones((2, 2, 2)), "-1"),
        ("none.npy", np.ones((2, 0, 2)), "(0, 2)"),
    ],
)
def test_an_array_that_is_no_trace(
    tmp_path: Path, name: str, array: np.ndarray, words: str
) -> None:
    np.save(tmp_path / name, array)
    with pytest.raises(UsageError) as error:
        read_trace(tmp_path / name, ANY)
    assert words in str(error.value)
    assert str(error.value).startswith("TRACE: ")


def test_documents_that_are_no_trace(tmp_path: Path) -> None:
    single = lines(tmp_path / "one.jsonl", [report(0, [[1]])])
    with pytest.raises(UsageError, match="no series of loads"):
        read_trace(single, ANY)
    (tmp_path / "rows.json").write_text("[[1, 2]]")
    with pytest.raises(UsageError, match="no series of loads"):
        read_trace(tmp_path / "rows.json", ANY)
    with pytest.raises(UsageError, match="must end in"):
        read_trace(tmp_path / "trace.txt", ANY)
