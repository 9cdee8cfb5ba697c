"""`moe-plan replay`: every strategy over a small trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.moe_plan import Done, moe_plan, refused

STRATEGIES = ["static", "fractions", "full", "steps", "policy"]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two kinds of load, one after the other."""
    rng = np.random.default_rng(2)
    kinds = rng.lognormal(0, 1, (2, 2, 8)) * 20_000
    windows = np.concatenate([np.repeat(kinds[:1], 3, axis=0), np.repeat(kinds[1:], 3, axis=0)])
    np.save(tmp_path / "trace.npy", windows)
    return tmp_path / "trace.npy"


def replay(trace: Path, *flags: object) -> Done:
    return moe_plan("replay", trace, "--ranks", 4, "--slots-per-rank", 3, *flags)


def by_strategy(done: Done) -> dict[str, Any]:
    return {one["strategy"]: one for one in done.json["strategies"]}


def test_strategies_do_what_they_say(trace: Path) -> None:
    found = by_strategy(replay(trace, "--json", "--bytes-per-expert", 1000))
    assert list(found) == STRATEGIES
    for one in found.values():
        assert len(one["windows"]) == 5
        assert one["bytes"] == one["moves"] * 1000
    assert found["static"]["moves"] == found["fractions"]["moves"] == 0
    assert found["full"]["gap"] <= found["static"]["gap"]
    assert found["steps"]["moves"] <= found["full"]["moves"]
    assert {window["change"]["reason"] for window in found["policy"]["windows"]} != {"Static"}


def test_only_the_strategies_asked_for_and_more_rounds(trace: Path) -> None:
    found = by_strategy(
        replay(trace, "--json", "--strategies", "full,static", "--rounds", 2, "--windows", "1:5")
    )
    assert list(found) == ["full", "static"]
    assert len(found["full"]["windows"]) == 7


def test_the_table_shows_every_strategy_over_time(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = replay(trace).out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for name in STRATEGIES:
        assert sum(line.startswith(name) for line in lines) >= 2
    assert any(line.startswith("policy said") for line in lines)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_imbalance_over_time_is_drawn(trace: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"time.{suffix}"
    assert replay(trace, "--plot", path, "--strategies", "static,policy").code == 0
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_trace_without_tokens_changes_nothing(tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", np.zeros((3, 2, 8)))
    done = replay(tmp_path / "trace.npy", "--json")
    assert done.code == 0
    assert "NaN" not in done.out
    found = by_strategy(done)
    assert found["policy"]["moves"] == 0
    assert replay(tmp_path / "trace.npy").code == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--strategies", "static,luck"), ("--strategies", "'luck'", "policy")),
        (("--strategies", ""), ("--strategies", "empty name")),
        (("--rounds", "0"), ("--rounds",)),
        (("--slots-per-rank", "3,3,3,2"), ("--slots-per-rank", "give one")),
        (("--slots-per-rank", "1"), ("8 experts",)),
        (("--windows", "7:9"), ("--windows", "0 to 5")),
        (("--windows", "0:1"), ("one window",)),
        (("--min-gain-percent", "101"), ("--min-gain-percent",)),
        (("--cooldown-seconds", "-1"), ("--cooldown-seconds",)),
        (("--max-moves-per-wave", "0"), ("--max-moves-per-wave",)),
        (("--max-bytes-per-second", "fast"), ("--max-bytes-per-second", "'fast'")),
        (("--min-copies", "2"), ("min_copies",)),
        (("--plot", "time.pdf"), ("--plot", ".png or .svg")),
        (("--dead", "4"), ("--dead", "rank 4")),
        (("--dead", "0,1"), ("8 experts",)),
        (("--draining", "1"), ("--draining",)),
    ],
)
def test_flags_that_do_not_fit(trace: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(replay(trace, *flags), *words)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    refused(replay(tmp_path / "missing.npy"), "TRACE", "No such file")
