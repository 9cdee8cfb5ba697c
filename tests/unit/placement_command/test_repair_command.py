"""`moe-plan repair`: what a lost or leaving rank alone held is placed anew, nothing else moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_api.plan import GroupPlan
from tests.support.moe_plan import moe_plan, refused

SLOTS = np.array([[[0, 1, -1], [2, 3, -1], [4, 5, 0]]], dtype=np.int32)
"""Ranks 0 and 1 have one free slot each; expert 0 has a copy on ranks 0 and 2."""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    np.savez(tmp_path / "plan.npz", slots=SLOTS)
    return tmp_path / "plan.npz"


@pytest.fixture
def load(tmp_path: Path) -> Path:
    np.save(tmp_path / "load.npy", np.array([[10.0, 20, 30, 40, 50, 60]]))
    return tmp_path / "load.npy"


def repaired(path: Path) -> np.ndarray:
    with np.load(path) as archive:
        slots, fractions = archive["slots"], archive["fractions"]
    sums = np.bincount(slots[slots >= 0], fractions[slots >= 0])
    assert sums == pytest.approx(1.0)
    return np.asarray(slots)


def test_the_fewest_transfers(plan: Path, load: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    done = moe_plan("repair", plan, "--load", load, "--dead", 2, "--output", output, "--json")
    assert done.code == 0
    assert (done.json["moves"], done.json["lost_experts"]) == (2, 2)
    slots = repaired(output)
    assert (slots[:, 2] == -1).all()
    assert np.array_equal(slots[:, :2, :2], SLOTS[:, :2, :2])
    assert sorted(slots[0, :2, 2].tolist()) == [4, 5]


def test_without_a_load_all_experts_count_alike(plan: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.npz"
    assert moe_plan("repair", plan, "--dead", 0, "--output", output).code == 0
    assert set(repaired(output).ravel().tolist()) == {-1, 0, 1, 2, 3, 4, 5}


def test_a_leaving_rank_gives_what_only_it_holds(plan: Path, load: Path) -> None:
    done = moe_plan("repair", plan, "--load", load, "--draining", 2, "--json")
    assert (done.json["moves"], done.json["lost_experts"]) == (2, 0)
    assert done.json["waves"] >= 1


def test_the_table_tells_what_was_lost(plan: Path, load: Path) -> None:
    out = moe_plan("repair", plan, "--load", load, "--dead", 2).out
    assert "2 experts lost the last copy" in out
    assert "survivors worst" in out


def test_a_document_keeps_its_members(plan: Path, tmp_path: Path) -> None:
    moe_plan("convert", plan, tmp_path / "plan.json")
    done = moe_plan("repair", tmp_path / "plan.json", "--dead", 2, "--output", tmp_path / "o.json")
    assert done.code == 0
    assert len(GroupPlan.from_json((tmp_path / "o.json").read_bytes()).members) == 3


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--dead or --draining is missing",)),
        (("--dead", "3"), ("--dead", "rank 3", "0 to 2")),
        (("--dead", "0-2"), ("no rank is left",)),
        (("--dead", "0,1"), ("6 experts",)),
        (("--dead", "0", "--output", "plan.txt"), ("--output", ".npz")),
        (("--dead", "0", "--stats", "stats.npz"), ("--stats", ".json")),
        (("--dead", "0", "--load", "missing.npy"), ("--load", "No such file")),
        (("--dead", "0", "--slots-per-rank", "2"), ("6 experts",)),
    ],
)
def test_what_can_not_be_repaired(
    plan: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(moe_plan("repair", plan, *flags), *words)
