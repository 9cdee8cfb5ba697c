"""Tables on screens of any width: headings give way, digits never."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from moe_placement.command.usage import LONGEST, one_line
from tests.support.moe_plan import moe_plan

RANKS = ("--ranks", 6, "--slots-per-rank", 5)


@pytest.fixture
def world(tmp_path: Path) -> Path:
    windows = np.random.default_rng(3).lognormal(0, 1, (3, 2, 16)) * 1e6
    np.save(tmp_path / "T.npy", windows)
    for name, window in (("P", 0), ("Q", 1)):
        np.save(tmp_path / f"{name}.npy", windows[window])
        output = ("--output", tmp_path / f"{name}.npz")
        assert moe_plan("plan", "--load", tmp_path / f"{name}.npy", *RANKS, *output).code == 0
    return tmp_path


LINES = [
    "plan --load Q.npy --ranks 6 --slots-per-rank 5 --current P.npz --domains 3,3",
    "score P.npz --load Q.npy --domains 3,3",
    "explain P.npz --load Q.npy",
    "explain P.npz --load Q.npy --layer 1",
    "explain P.npz --load Q.npy --layer 1 --expert 2 --domains 3,3",
    "diff P.npz Q.npz --moves --domains 3,3",
    "repair P.npz --dead 2 --load Q.npy --slots-per-rank 6",
    "replay T.npy --ranks 6 --slots-per-rank 5",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("columns", ["20", "60", "80"])
def test_no_figure_is_cut(
    world: Path, monkeypatch: pytest.MonkeyPatch, line: str, columns: str
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("COLUMNS", columns)
    done = moe_plan(*line.split())
    assert (done.code, done.err) == (0, "")
    assert "…" not in done.out


@pytest.mark.parametrize("line", LINES)
def test_a_usual_screen_is_wide_enough(
    world: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(world)
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, moe_plan(*line.split()).out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("two\nlines\tand more", "two lines and more"),
        ("red \x1b[31m bell \x07", r"red \x1b[31m bell \x07"),
        ("turned \u202e round", r"turned \u202e round"),
        ("grün 名", "grün 名"),
        ("from a shell \udcff", r"from a shell \udcff"),
    ],
)
def test_an_error_can_not_steer_the_terminal(message: str, shown: str) -> None:
    assert one_line(message) == shown


def test_an_error_is_one_line_however_long_its_cause() -> None:
    line = one_line("the flag " + "x" * 10**6 + " the way out")
    assert len(line) <= LONGEST + 3
    assert re.fullmatch(r"the flag x+ … x+ the way out", line)
