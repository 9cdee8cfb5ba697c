"""`moe-plan score`: figures by hand, tables for people, JSON for programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.moe_plan import moe_plan, refused


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """Two layers on two ranks with one slot each (A11)."""
    np.savez(tmp_path / "plan.npz", slots=[[[0], [1]], [[0], [1]]])
    return tmp_path / "plan.npz"


def saved(path: Path, load: object) -> Path:
    np.save(path, np.array(load, dtype=np.float64))
    return path


def test_opposite_layers_do_not_cancel(plan: Path, tmp_path: Path) -> None:
    load = saved(tmp_path / "load.npy", [[100, 0], [0, 100]])
    found = moe_plan("score", plan, "--load", load, "--json").json
    assert [layer["balancedness"] for layer in found["layers"]] == [0.5, 0.5]
    assert found["balancedness"] == 0.5
    assert found["imbalance"] == 2


def test_every_figure(tmp_path: Path) -> None:
    np.savez(tmp_path / "plan.npz", slots=[[[0, 1], [0, 2]]], fractions=[[[0.5, 1], [0.5, 1]]])
    load = saved(tmp_path / "load.npy", [[60, 30, 10]])
    found = moe_plan("score", tmp_path / "plan.npz", "--load", load, "--json").json
    assert found["layers"] == [
        {
            "layer": 0, "tokens": 100, "largest": 60, "bound": 50,
            "imbalance": 1.2, "balancedness": pytest.approx(1 / 1.2),
            "excess": pytest.approx(0.2), "gap": pytest.approx(0.2),
        }
    ]  # fmt: skip
    assert found["gap_worst"] == found["gap_mean"] == pytest.approx(0.2)
    resplit = moe_plan("score", tmp_path / "plan.npz", "--load", load, "--resplit", "--json").json
    assert resplit["imbalance"] == pytest.approx(1.0)


def test_a_slow_rank_is_full_sooner(tmp_path: Path) -> None:
    np.savez(tmp_path / "plan.npz", slots=[[[0], [1]]])
    load = saved(tmp_path / "load.npy", [[100, 50]])
    for speeds in ("1,0.5", saved(tmp_path / "speeds.npy", [1, 0.5])):
        found = moe_plan(
            "score", tmp_path / "plan.npz", "--load", load, "--speeds", speeds, "--json"
        ).json
        assert found["imbalance"] == pytest.approx(1)


def test_no_tokens_is_perfect_and_never_nan(plan: Path, tmp_path: Path) -> None:
    load = saved(tmp_path / "load.npy", [[0, 0], [0, 0]])
    done = moe_plan("score", plan, "--load", load, "--json")
    assert done.json["imbalance"] == 1
    assert done.json["gap_worst"] == 0
    assert "NaN" not in done.out
    table = moe_plan("score", plan, "--load", load)
    assert table.code == 0
    assert "nan" not in table.out


def test_experts_that_have_no_copy_are_told(plan: Path, tmp_path: Path) -> None:
    load = saved(tmp_path / "load.npy", [[1, 1, 1], [1, 1, 0]])
    assert moe_plan("score", plan, "--load", load, "--json").json["uncovered_experts"] == 1
    assert "1 experts have tokens but no copy" in moe_plan("score", plan, "--load", load).out


def test_a_table_for_people_fits_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rng = np.random.default_rng(0)
    for ranks in (4, 200, 3000):
        slots = rng.integers(0, 64, (9, ranks, 2))
        slots[:, :32] = np.arange(64).reshape(32, 2) if ranks > 4 else slots[:, :32]
        np.savez(tmp_path / "plan.npz", slots=slots)
        load = saved(tmp_path / "load.npy", rng.lognormal(0, 1, (9, 64)))
        lines = moe_plan("score", tmp_path / "plan.npz", "--load", load).out.splitlines()
        assert len(lines) <= 40
        assert max(map(len, lines)) <= 80
        assert any("█" in line for line in lines)


def test_no_colours_without_a_terminal(plan: Path, tmp_path: Path) -> None:
    load = saved(tmp_path / "load.npy", [[100, 0], [0, 100]])
    assert "\x1b" not in moe_plan("score", plan, "--load", load).out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--dead", "2"), ("--dead", "rank 2", "0 to 1")),
        (("--dead", "0,1"), ("no rank is left",)),
        (("--dead", "x"), ("--dead", "'x'")),
        (("--dead", "3-1"), ("--dead", "'3-1'")),
        (("--dead", "9"), ("--dead", "rank 9")),
        (("--speeds", "1"), ("--speeds", "2 ranks")),
        (("--speeds", "1,x"), ("--speeds", "'1,x'")),
        (("--speeds", "1,-1"), ("rank 1 has speed -1",)),
        (("--speeds", "1,nan"), ("rank 1 has speed nan",)),
        (("--speeds", "missing.npy"), ("--speeds", "missing.npy", "No such file")),
        (("--domains", "1,x"), ("--domains", "'x'")),
        (("--slots-per-rank", "1,2,3"), ("--slots-per-rank", "3 entries for 2 ranks")),
        (("--slots-per-rank", "99999999"), ("--slots-per-rank",)),
        (("--ranks", "3"), ("is for 2 ranks",)),
        (("--corpus", ","), ("--corpus", "empty name")),
        (("--windows", "a"), ("--windows", "'a'")),
        (("--nonsense",), ("--nonsense",)),
    ],
)
def test_flags_that_do_not_fit(
    plan: Path, tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    load = saved(tmp_path / "load.npy", [[1, 1], [1, 1]])
    refused(moe_plan("score", plan, "--load", load, *flags), *words)


def test_a_load_of_another_model(plan: Path, tmp_path: Path) -> None:
    load = saved(tmp_path / "load.npy", [[1, 1]])
    refused(moe_plan("score", plan, "--load", load), "has 2 layers, --load has 1")
    load = saved(tmp_path / "load.npy", [[1], [1]])
    refused(moe_plan("score", plan, "--load", load), "layer 0, rank 1 holds expert 1")
