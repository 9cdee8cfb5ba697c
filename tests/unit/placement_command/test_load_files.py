"""Loads of every format, and the one line for each file that is none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_placement.command.choice import Choice
from moe_placement.command.load_files import Load, read_load
from moe_placement.command.usage import UsageError

ANY = Choice()
ROWS = [[4, 0, 1], [2, 2, 1]]


def report(member: int, routed: list[list[int]], incarnation: str = "a", at: float = 0) -> Any:
    return {
        "schema": 1, "incarnation": incarnation, "member": member, "generation": 1, "epoch": 1,
        "monotonicSeconds": at, "routed": routed, "served": [[0]],
    }  # fmt: skip


def read(path: Path, choice: Choice = ANY) -> Load:
    return read_load("--load", path, choice)


def written(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document))
    return path


def test_an_array_is_layers_by_experts(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.array(ROWS, dtype=np.int32))
    load = read(tmp_path / "l.npy")
    assert load.load_LE.dtype == np.float64
    assert load.load_LE.tolist() == ROWS
    assert load.experts_L.tolist() == [3, 3]


def test_an_archive_names_the_load_and_the_experts_of_each_layer(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", load=[[4.0, 1, 2], [3, 3, 0]], experts=[3, 2], other=[1])
    load = read(tmp_path / "l.npz")
    assert load.experts_L.tolist() == [3, 2]


def test_the_only_array_of_an_archive_needs_no_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", whatever=ROWS)
    assert read(tmp_path / "l.npz").load_LE.tolist() == ROWS


@pytest.mark.parametrize("document", [ROWS, {"load": ROWS}, {"logical_count": ROWS, "x": 1}])
def test_rows_as_json(tmp_path: Path, document: Any) -> None:
    assert read(written(tmp_path / "l.json", document)).load_LE.tolist() == ROWS


def test_rows_as_yaml(tmp_path: Path) -> None:
    (tmp_path / "l.yaml").write_text("load:\n- [4, 0, 1]\n- [2, 2, 1]\n")
    assert read(tmp_path / "l.yaml").load_LE.tolist() == ROWS


def test_rows_may_differ_in_length(tmp_path: Path) -> None:
    load = read(written(tmp_path / "l.json", [[4, 0, 1], [2, 2]]))
    assert load.experts_L.tolist() == [3, 2]
    assert load.load_LE.tolist() == [[4, 0, 1], [2, 2, 0]]


def test_reports_of_processes_are_added_and_the_newest_of_each_counts(tmp_path: Path) -> None:
    reports = [
        report(0, [[1, 1]]),
        report(1, [[10, 0]]),
        report(0, [[3, 1]], at=5),
        report(1, [[0, 2]], incarnation="b", at=6),
    ]
    expected = [[13.0, 3.0]]
    lines = tmp_path / "r.jsonl"
    lines.write_text("\n".join(map(json.dumps, reports)))
    assert read(lines).load_LE.tolist() == expected
    assert read(written(tmp_path / "a.json", reports)).load_LE.tolist() == expected
    assert read(written(tmp_path / "b.json", {"reports": reports})).load_LE.tolist() == expected
    assert read(written(tmp_path / "c.json", reports[0])).load_LE.tolist() == [[1.0, 1.0]]


COUNTS = {"model": "x", "counts": {"law": [[1, 2]], "code": [[10, 0]]}}


@pytest.mark.parametrize(
    ("corpora", "expected"),
    [(("law",), [[1, 2]]), (("law", "code"), [[11, 2]]), (("all",), [[11, 2]])],
)
def test_a_corpus_is_chosen(tmp_path: Path, corpora: tuple[str, ...], expected: Any) -> None:
    path = written(tmp_path / "counts.json", COUNTS)
    assert read(path, Choice(corpora)).load_LE.tolist() == expected


def routing(path: Path) -> Path:
    """Two corpora, two layers, two experts a token; corpus `law` has five tokens."""
    law = np.array([[[0, 1], [2, 3]]] * 4 + [[[3, 1], [0, 1]]], dtype=np.uint8)
    np.savez(path, law=law, law_doc_lengths=[5], code=law[:1], code_doc_lengths=[1])
    return path


def test_token_routing_is_counted(tmp_path: Path) -> None:
    load = read(routing(tmp_path / "r.npz"), Choice(("law",)))
    assert load.load_LE.tolist() == [[4, 5, 0, 1], [1, 1, 4, 4]]


def test_token_routing_in_windows(tmp_path: Path) -> None:
    choice = Choice(("law",), slice(1, 2), window_tokens=2, num_experts=6)
    load = read(routing(tmp_path / "r.npz"), choice)
    assert load.load_LE.tolist() == [[2, 2, 0, 0, 0, 0], [0, 0, 2, 2, 0, 0]]


def test_windows_of_an_array_are_chosen_and_added(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.arange(12).reshape(3, 2, 2))
    load = read(tmp_path / "w.npy", Choice(windows=slice(1, 3)))
    assert load.load_LE.tolist() == [[12, 14], [16, 18]]


def test_a_single_window_needs_no_choice(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones((1, 2, 2)))
    assert read(tmp_path / "w.npy").load_LE.tolist() == [[1, 1], [1, 1]]


ARRAYS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "nan": (np.array([[1.0, np.nan]]), ("layer 0, expert 1", "nan")),
    "infinite": (np.array([[1.0, 2], [np.inf, 1]]), ("layer 1, expert 0", "inf")),
    "negative": (np.array([[1.0, -2]]), ("layer 0, expert 1", "-2")),
    "one dimension": (np.ones(3), ("1 dimensions", "[layers, experts]")),
    "four dimensions": (np.ones((1, 1, 1, 1)), ("4 dimensions",)),
    "no layers": (np.ones((0, 4)), ("(0, 4)",)),
    "no experts": (np.ones((4, 0)), ("(4, 0)",)),
    "windows": (np.ones((3, 2, 2)), ("3 windows", "--windows", "0:3")),
    "complex": (np.ones((2, 2), dtype=complex), ("complex128",)),
    "text": (np.array([["a", "b"]]), ("<U1",)),
    "objects": (np.array([[1, None]], dtype=object), ("no whole .npy file of numbers",)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_that_is_no_load(tmp_path: Path, name: str) -> None:
    array, words = ARRAYS[name]
    path = tmp_path / "l.npy"
    np.save(path, array, allow_pickle=True)
    with pytest.raises(UsageError) as error:
        read(path)
    check_line(str(error.value), str(path), *words)


def test_a_pickled_array_is_never_executed(tmp_path: Path) -> None:
    for name in ("l.npy", "l.npz"):
        path = tmp_path / name
        path.write_bytes(pickle.dumps([1, 2]))
        with pytest.raises(UsageError, match="no whole"):
            read(path)


def test_truncated_files(tmp_path: Path) -> None:
    np.save(tmp_path / "l.npy", np.ones((4, 4)))
    np.savez(tmp_path / "l.npz", load=np.ones((40, 40)))
    for name in ("l.npy", "l.npz"):
        path = tmp_path / name
        content = path.read_bytes()
        for length in (0, 5, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(UsageError) as error:
                read(path)
            check_line(str(error.value), str(path), "no whole")


def test_an_archive_with_a_damaged_member(tmp_path: Path) -> None:
    path = tmp_path / "l.npz"
    np.savez_compressed(path, load=np.arange(10_000.0).reshape(100, 100))
    content = bytearray(path.read_bytes())
    content[200:220] = bytes(20)
    path.write_bytes(content)
    with pytest.raises(UsageError, match="no whole"):
        read(path)


ARCHIVES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "several arrays": ({"a": [[1]], "b": [[1]]}, ("a, b", "'load'")),
    "empty": ({}, ("no arrays",)),
    "experts of another length": (
        {"load": [[1, 2]], "experts": [2, 2]},
        ("experts has shape (2,)", "(1,)"),
    ),
    "too many experts": ({"load": [[1, 2]], "experts": [3]}, ("layer 0 has 3 experts",)),
    "load of no expert": ({"load": [[1, 2]], "experts": [1]}, ("load beyond them",)),
    "half an expert": ({"load": [[1, 2]], "experts": [1.5]}, ("whole numbers",)),
    "routing in floats": (
        {"law": np.ones((2, 2, 2)), "law_doc_lengths": [2]},
        ("(2, 2, 2)", "token routing"),
    ),
    "routing of negative experts": (
        {"law": np.full((1, 1, 1), -1), "law_doc_lengths": [1]},
        ("names expert -1",),
    ),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_that_is_no_load(tmp_path: Path, name: str) -> None:
    found, words = ARCHIVES[name]
    path = tmp_path / "l.npz"
    np.savez(path, **found)
    with pytest.raises(UsageError) as error:
        read(path)
    check_line(str(error.value), str(path), *words)


DOCUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "not JSON": ("{", ("no JSON",)),
    "a number": ("7", ("a row of token counts per layer",)),
    "no rows": ("[]", ("a row of token counts per layer",)),
    "rows of text": ('[["a"]]', ("layer 0, expert 0 is 'a'",)),
    "rows of truth": ("[[true]]", ("layer 0, expert 0 is True",)),
    "nested too deep": ("[[[1]]]", ("layer 0, expert 0 is [1]",)),
    "an empty row": ("[[1, 2], []]", ("layer 1 has 0 experts",)),
    "NaN": ("[[1, NaN]]", ("layer 0, expert 1 is nan",)),
    "something else": ('{"apiVersion": "v1"}', ("apiVersion", "LoadReports")),
    "several corpora": (json.dumps(COUNTS), ("--corpus", "law, code")),
    "a report without members": ('{"routed": [[1]]}', ("report 0", "Field required")),
    "reports of two models": (
        json.dumps([report(0, [[1, 2]]), report(1, [[1]])]),
        ("report 1", "member 1"),
    ),
    "a newer report": (json.dumps({**report(0, [[1]]), "schema": 99}), ("schema 99", "upgrade")),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_that_is_no_load(tmp_path: Path, name: str) -> None:
    text, words = DOCUMENTS[name]
    path = tmp_path / "l.json"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        read(path)
    check_line(str(error.value), str(path), *words)


def test_a_corpus_that_is_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "counts.json", COUNTS)
    with pytest.raises(UsageError, match=r"no corpus 'poems': choose with --corpus: law, code"):
        read(path, Choice(("poems",)))


def test_experts_below_those_of_the_routing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"names expert 3: .* --experts"):
        read(routing(tmp_path / "r.npz"), Choice(("law",), num_experts=3))


def test_windows_that_are_not_there(tmp_path: Path) -> None:
    np.save(tmp_path / "w.npy", np.ones((3, 2, 2)))
    with pytest.raises(UsageError, match=r"windows 0 to 2"):
        read(tmp_path / "w.npy", Choice(windows=slice(3, 9)))


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.npy").mkdir()
    (tmp_path / "text.npy").write_text("hello")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("missing.npy", "No such file"),
        ("folder.npy", "is a folder"),
        ("text.npy", "no whole .npy"),
        ("bytes.json", "as text"),
        ("load.csv", ".npy, .npz, .json"),
        ("dump.pt", "numpy.save"),
    ):
        with pytest.raises(UsageError) as error:
            read(tmp_path / name)
        check_line(str(error.value), str(tmp_path / name), words)


def check_line(message: str, *words: str) -> None:
    assert message.startswith("--load: ")
    assert "\n" not in message
    for word in words:
        assert word in message, message
