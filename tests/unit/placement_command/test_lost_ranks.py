"""`--dead` in every command: what ranks that are gone held is not counted as there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.moe_plan import moe_plan, refused

RANKS, SLOTS, EXPERTS = 5, 6, 12


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    windows = np.random.default_rng(5).lognormal(0, 1, (4, 2, EXPERTS)) * 1e5
    np.save("L.npy", windows[0])
    np.save("T.npy", windows)
    flags = ("--ranks", RANKS, "--slots-per-rank", SLOTS, "--min-copies", 2)
    assert moe_plan("plan", "--load", "L.npy", *flags, "--output", "P.npz").code == 0
    with np.load("P.npz") as archive:
        slots = archive["slots"][:, [0, 1, 3, 4]]
        np.savez("left.npz", slots=slots, fractions=_filled(slots, archive["fractions"]))
    return tmp_path


def _filled(slots: np.ndarray, fractions: np.ndarray) -> np.ndarray:
    """Shares of the copies that are left, in proportion."""
    shares = fractions[:, [0, 1, 3, 4]].copy()
    for layer in range(len(slots)):
        for expert in range(EXPERTS):
            at = slots[layer] == expert
            total = shares[layer][at].sum()
            shares[layer][at] = shares[layer][at] / total if total else 1 / at.sum()
    return shares


def test_a_score_is_that_of_the_survivors(world: Path) -> None:
    found = moe_plan("score", "P.npz", "--load", "L.npy", "--dead", 2, "--json").json
    expected = moe_plan("score", "left.npz", "--load", "L.npy", "--json").json
    for layer, other in zip(found["layers"], expected["layers"], strict=True):
        assert layer == pytest.approx(other)
        assert layer["largest"] >= layer["bound"] * (1 - 1e-9)


def test_an_explanation_is_of_the_survivors(world: Path) -> None:
    found = moe_plan("explain", "P.npz", "--load", "L.npy", "--dead", 2, "--json").json
    for layer in found["layers"]:
        assert layer["largest"] >= layer["bound"] * (1 - 1e-9)
    one = ("--layer", 0, "--json")
    for story in moe_plan("explain", "P.npz", "--load", "L.npy", "--dead", 2, *one).json["experts"]:
        assert 2 not in [copy["rank"] for copy in story["copies"]]


def test_an_expert_that_is_lost_is_told(world: Path) -> None:
    np.savez("one.npz", slots=[[[0], [1]]])
    np.save("two.npy", [[3.0, 5.0]])
    assert "1 experts have tokens but no copy" in (
        moe_plan("score", "one.npz", "--load", "two.npy", "--dead", 1).out
    )


def test_a_trace_is_served_by_the_survivors(world: Path) -> None:
    flags = ("--slots-per-rank", SLOTS, "--strategies", "static,steps", "--json")
    found = moe_plan("replay", "T.npy", "--ranks", RANKS, "--dead", 2, *flags)
    assert found.code == 0
    assert found.json == moe_plan("replay", "T.npy", "--ranks", RANKS - 1, *flags).json


def test_survivors_keep_their_own_speed(world: Path) -> None:
    flags = ("--slots-per-rank", SLOTS, "--strategies", "static", "--json")
    found = moe_plan(
        "replay", "T.npy", "--ranks", 5, "--dead", 0, "--speeds", "9,1,1,1,0.5", *flags
    )
    assert (
        found.json
        == moe_plan("replay", "T.npy", "--ranks", 4, "--speeds", "1,1,1,0.5", *flags).json
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dead", "1", "--draining", "0,1"), ("--dead, --draining", "rank 1")),
        (("--dead", "0-"), ("'0-'", "like 8-15")),
        (("--dead", "x"), ("'x'",)),
        (("--dead=-1",), ("'-1'",)),
        (("--near",), ("--near", "--domains")),
        (("--near", "--domains", "2,3", "--split", "even"), ("--near", "--split even")),
        (("--spread", "2"), ("--spread", "--domains")),
        (("--speeds", "1,1,1,1,1e-300"), ("--speeds", "rank 4", "1e-300")),
        (("--speeds", "1,1e300,1,1,1"), ("--speeds", "rank 1", "1e+300")),
        (("--speeds", "0,1,1,1,1"), ("--speeds", "rank 0")),
        (("--min-copies", "4"), ("--min-copies",)),
        (("--dead", "0-3"), ("--slots-per-rank", "12 experts")),
        (("--bytes-per-expert", "99999999Ti"), ("--bytes-per-expert", "99999999Ti")),
        (("--output", "L.json", "--stats", "L.json"), ("--stats", "--output")),
    ],
)
def test_flags_that_contradict_each_other_or_the_world(
    world: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    sized = ("--ranks", RANKS, "--slots-per-rank", SLOTS)
    refused(moe_plan("plan", "--load", "L.npy", *sized, *flags), *words)
