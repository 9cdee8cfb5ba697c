"""`moe-plan diff`: moves, waves and links between two plans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.moe_plan import moe_plan, refused

OLD = [[[0, 1], [2, 3], [4, 5], [0, 2]]]
NEW = [[[0, 1], [2, 3], [4, 5], [5, 2]]]


def saved(path: Path, slots: object) -> Path:
    np.savez(path, slots=np.array(slots))
    return path


@pytest.fixture
def plans(tmp_path: Path) -> tuple[Path, Path]:
    return saved(tmp_path / "old.npz", OLD), saved(tmp_path / "new.npz", NEW)


def test_one_weight_moves(plans: tuple[Path, Path]) -> None:
    found = moe_plan("diff", *plans, "--json", "--bytes-per-expert", 1000).json
    assert (found["moves"], found["bytes"], found["reached"]) == (1, 1000, True)
    assert found["waves"] == len(found["steps"])
    moves = [move for step in found["steps"] for move in step["moves"]]
    assert [(move["expert"], move["rank"], move["source"]) for move in moves] == [(5, 3, 2)]
    assert sum(step["retired"] for step in found["steps"]) == 1


def test_bytes_over_links(plans: tuple[Path, Path]) -> None:
    for domains, crossing in (("2,2", 0), ("1,1,1,1", 1000), ("3,1", 1000)):
        found = moe_plan(
            "diff", *plans, "--json", "--bytes-per-expert", 1000, "--domains", domains
        ).json
        assert sum(step["crossing_bytes"] for step in found["steps"]) == crossing
    table = moe_plan("diff", *plans, "--domains", "3,1").out
    assert "0 → 1" in table


def test_nothing_moves_to_where_one_is(plans: tuple[Path, Path]) -> None:
    found = moe_plan("diff", plans[0], plans[0], "--json").json
    assert (found["moves"], found["waves"], found["steps"], found["reached"]) == (0, 0, [], True)
    assert "nothing moves" in moe_plan("diff", plans[0], plans[0]).out


def test_another_slot_of_the_same_rank_is_no_move(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.npz", [[[0, 1], [2, 3]]])
    new = saved(tmp_path / "new.npz", [[[1, 0], [2, 3]]])
    assert moe_plan("diff", old, new, "--json").json["moves"] == 0


def test_a_swap_of_only_copies_needs_a_spare_slot(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.npz", [[[0, 1], [2, 3]]])
    new = saved(tmp_path / "new.npz", [[[0, 2], [1, 3]]])
    found = moe_plan("diff", old, new, "--json").json
    assert (found["moves"], found["reached"]) == (2, True)
    stuck = moe_plan("diff", old, new, "--json", "--spare-slots", 0).json
    assert not stuck["reached"]
    told = moe_plan("diff", old, new, "--spare-slots", 0).out
    assert "give more --spare-slots" in " ".join(told.split())


def test_waves_keep_to_their_limits(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    slots = [rng.permutation(12).reshape(1, 4, 3) for _ in range(2)]
    old, new = saved(tmp_path / "old.npz", slots[0]), saved(tmp_path / "new.npz", slots[1])
    free = moe_plan("diff", old, new, "--json").json
    found = moe_plan("diff", old, new, "--json", "--max-moves-per-wave", 1).json
    assert all(len(step["moves"]) <= 1 for step in found["steps"])
    assert found["waves"] > free["waves"]
    assert found["reached"]
    listed = moe_plan("diff", old, new, "--moves").out
    assert "from rank" in listed


def test_weights_of_a_dead_rank_come_from_others_or_from_disk(tmp_path: Path) -> None:
    old = saved(tmp_path / "old.npz", [[[0, 1], [1, 2], [3, -1]]])
    new = saved(tmp_path / "new.npz", [[[0, 1], [1, 2], [-1, -1]]])
    assert moe_plan("diff", old, new, "--dead", "2").code == 2  # expert 3 would be nowhere
    new = saved(tmp_path / "new.npz", [[[0, 3], [1, 2], [-1, -1]]])
    found = moe_plan("diff", old, new, "--dead", "2", "--json").json
    assert sum(step["from_checkpoint"] for step in found["steps"]) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--max-moves-per-wave", "0"), ("--max-moves-per-wave",)),
        (("--max-link-bytes", "10"), ("--max-link-bytes", "44040192")),
        (("--max-link-bytes", "x"), ("--max-link-bytes", "'x'")),
        (("--domains", "1"), ("--domains", "there are 4")),
        (("--dead", "4"), ("--dead", "rank 4")),
        (("--ranks", "3"), ("is for 4 ranks",)),
    ],
)
def test_flags_that_do_not_fit(
    plans: tuple[Path, Path], flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(moe_plan("diff", *plans, *flags), *words)


def test_plans_of_other_ranks_or_layers(plans: tuple[Path, Path], tmp_path: Path) -> None:
    other = saved(tmp_path / "other.npz", [[[0, 1], [2, 3]]])
    refused(moe_plan("diff", plans[0], other), "NEW: 1 layers on 2 ranks, OLD has 1 on 4")
    refused(moe_plan("diff", tmp_path / "missing.npz", other), "OLD", "No such file")
    refused(moe_plan("diff", plans[0], tmp_path / "missing.npz"), "NEW", "No such file")
