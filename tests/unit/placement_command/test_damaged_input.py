"""Files that no reader of `moe-plan` may stumble over: each is refused in one line, none is run."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe_placement.command import arrays, texts
from moe_placement.command.usage import LONGEST
from tests.support.moe_plan import Done, moe_plan, refused

HEADER = b"\x93NUMPY\x01\x00v\x00{'descr': '<f8', 'fortran_order': False, 'shape': (%s, 4), }"
ENDLESS = "&a [*a]"
BOMB = "a: &a [1,1]\n" + "".join(f"x{n}: &x{n} [*{b},*{b}]\n" for n, b in enumerate(
    ["a", *(f"x{n}" for n in range(39))]))  # fmt: skip


def load(path: Path) -> Done:
    return moe_plan("plan", "--load", path, "--ranks", 2, "--slots-per-rank", 4)


def score(path: Path) -> Done:
    np.save(path.parent / "tokens.npy", np.ones((1, 4)))
    return moe_plan("score", path, "--load", path.parent / "tokens.npy")


def replay(path: Path) -> Done:
    return moe_plan("replay", path, "--ranks", 2, "--slots-per-rank", 4)


@pytest.mark.parametrize("read", [load, score, replay])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", (HEADER % (b"9" * 30)).ljust(127) + b"\n"),
        ("a.npy", b"no array"),
        ("a.npz", b""),
        ("a.json", b"[[" + b"9" * 400 + b"]]"),
        ("a.json", b"[[" + b"9" * 5000 + b"]]"),
        ("a.jsonl", b"[" + b"9" * 5000 + b"]"),
        ("a.json", b"[" * 100_000),
        ("a.yaml", b"[[" + b"9" * 5000 + b"]]"),
        ("a.yaml", b"[[2020-99-99, 1]]"),
        ("a.yaml", b"[" * 3000 + b"]" * 3000),
        ("a.yaml", ENDLESS.encode()),
        ("a.yaml", f"layers: {ENDLESS}".encode()),
        ("a.yaml", BOMB.encode()),
        ("a.yaml", b"initial_global_assignments: {.inf: [0]}"),
        ("a.json", b'{"load": [[[' + b"1," * 99_999 + b"1]]]}"),
        ("a.json", b'{"counts": {"\\u001b[31m": [[1]], "b": [[1]]}}'),
    ],
)
def test_what_can_not_be_read(
    tmp_path: Path, read: Callable[[Path], Done], name: str, content: bytes
) -> None:
    (tmp_path / name).write_bytes(content)
    done = read(tmp_path / name)
    refused(done, name)
    assert len(done.err) < LONGEST + 50
    assert "allow_pickle" not in done.err
    assert "\x1b" not in done.err


def test_an_alias_that_is_no_trick_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("- &row [1, 2]\n- *row\n")
    assert texts.read_text("--load", tmp_path / "a.yaml") == [[1, 2], [1, 2]]


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("\ufeff[[1, 2]]", encoding="utf-8")
    assert load(tmp_path / "a.json").code == 0


@pytest.mark.parametrize("tokens", [1e308, 2.0**65, 5e-324, 1e-30])
@pytest.mark.parametrize("split", ["fractions", "even"])
def test_tokens_that_can_not_be_counted_with(tmp_path: Path, tokens: float, split: str) -> None:
    np.save(tmp_path / "l.npy", np.full((2, 4), tokens))
    flags = ("--ranks", 2, "--slots-per-rank", 4, "--split", split)
    refused(moe_plan("plan", "--load", tmp_path / "l.npy", *flags), "layer 0", "scale it")
    np.save(tmp_path / "l.npy", np.full((3, 2, 4), tokens))
    windows = ("--windows", "0:3")
    refused(moe_plan("plan", "--load", tmp_path / "l.npy", *flags, *windows), "layer 0")


@pytest.mark.parametrize("expert", [65536, 2**31 - 2, 2**50])
def test_an_expert_that_no_model_has_takes_no_memory(tmp_path: Path, expert: int) -> None:
    np.savez(tmp_path / "p.npz", slots=np.array([[[0, expert]]]))
    refused(moe_plan("repair", tmp_path / "p.npz", "--draining", 0), str(expert), "0 to 65535")


def test_a_small_archive_that_unpacks_to_a_large_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez_compressed(tmp_path / "l.npz", load=np.zeros((100, 1000)))
    monkeypatch.setattr(arrays, "MAX_BYTES", 50_000)
    assert (tmp_path / "l.npz").stat().st_size < arrays.MAX_BYTES
    refused(load(tmp_path / "l.npz"), "unpacked", "50000")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "l.npy")
    refused(load(tmp_path / "l.npy"), "pipe")


@pytest.mark.parametrize("name", ["l.npy", "l.npz", "l.json"])
def test_a_file_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).write_bytes(b"")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    refused(load(tmp_path / name), name, "permissions")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"experts": [4]}, ("no array 'load'",)),
        ({"law_doc_lengths": [4]}, ("no corpus",)),
    ],
)
def test_an_archive_without_the_array_it_is_read_for(
    tmp_path: Path, arrays: dict[str, list[int]], words: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "l.npz", **arrays)  # type: ignore[arg-type]
    refused(load(tmp_path / "l.npz"), *words)


def test_a_member_that_is_packed_in_a_way_nobody_knows(tmp_path: Path) -> None:
    np.savez(tmp_path / "l.npz", load=np.ones((1, 4)))
    content = bytearray((tmp_path / "l.npz").read_bytes())
    with zipfile.ZipFile(tmp_path / "l.npz") as archive:
        directory = archive.start_dir
    content[8:10] = content[directory + 10 : directory + 12] = (99).to_bytes(2, "little")
    (tmp_path / "l.npz").write_bytes(content)
    refused(load(tmp_path / "l.npz"), "l.npz")
