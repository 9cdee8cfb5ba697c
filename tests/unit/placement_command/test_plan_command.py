"""`moe-plan plan`: what it writes, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_api.plan import GroupPlan
from tests.support.moe_plan import Done, moe_plan, refused

RANKS, SLOTS, EXPERTS, LAYERS = 6, 4, 16, 5
STATS = {"gap_worst", "gap_mean", "imbalance", "moves", "bytes", "waves", "plan_seconds"}


def load(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0, 1, (LAYERS, EXPERTS)) * 1000


def saved(path: Path, array: object) -> Path:
    np.save(path, np.asarray(array))
    return path


def plan(tmp_path: Path, *flags: object, array: object = None) -> Done:
    """Plan with stats as S.json and the plan as P.npz."""
    path = saved(tmp_path / "L.npy", load() if array is None else array)
    return moe_plan(
        "plan", "--load", path, "--ranks", RANKS, "--slots-per-rank", SLOTS,
        "--output", tmp_path / "P.npz", "--stats", tmp_path / "S.json", *flags,
    )  # fmt: skip


def stats(tmp_path: Path) -> dict[str, Any]:
    found = json.loads((tmp_path / "S.json").read_text())
    assert found.keys() >= STATS
    return dict(found)


def arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return archive["slots"], archive["fractions"]


def judged(slots: np.ndarray, fractions: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Imbalance of each layer, counted slot by slot."""
    imbalance = []
    for layer in range(len(slots)):
        ranks = np.zeros(slots.shape[1])
        sums = np.zeros(tokens.shape[1])
        for rank, slot in np.argwhere(slots[layer] >= 0):
            expert, share = slots[layer, rank, slot], fractions[layer, rank, slot]
            ranks[rank] += tokens[layer, expert] * share
            sums[expert] += share
        assert np.abs(sums - 1).max() < 1e-6
        imbalance.append(ranks.max() / ranks.mean())
    return np.array(imbalance)


def test_the_plan_and_its_figures(tmp_path: Path) -> None:
    assert plan(tmp_path).code == 0
    slots, fractions = arrays(tmp_path / "P.npz")
    assert slots.shape == fractions.shape == (LAYERS, RANKS, SLOTS)
    assert slots.dtype.kind == "i"
    found = stats(tmp_path)
    assert found["imbalance"] == pytest.approx(judged(slots, fractions, load()).max())
    assert found["gap_worst"] <= 1e-4
    assert 0 <= found["gap_mean"] <= found["gap_worst"]
    assert found["plan_seconds"] > 0
    assert found["bytes"] == found["moves"] * 44_040_192


def test_an_even_split_is_even(tmp_path: Path) -> None:
    plan(tmp_path, "--split", "even")
    slots, fractions = arrays(tmp_path / "P.npz")
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            shares = fractions[layer][slots[layer] == expert]
            assert shares == pytest.approx(1 / len(shares))


def test_json_is_what_stats_are(tmp_path: Path) -> None:
    done = plan(tmp_path, "--json")
    assert done.json == stats(tmp_path)
    assert done.err == ""


def test_the_same_load_moves_nothing(tmp_path: Path) -> None:
    plan(tmp_path)
    first = (tmp_path / "P.npz").read_bytes()
    assert plan(tmp_path, "--current", tmp_path / "P.npz").code == 0
    found = stats(tmp_path)
    assert (found["moves"], found["bytes"], found["waves"]) == (0, 0, 0)
    assert arrays(tmp_path / "P.npz")[0].tolist() == _slots(first, tmp_path)


def _slots(content: bytes, tmp_path: Path) -> list[Any]:
    (tmp_path / "first.npz").write_bytes(content)
    found: list[Any] = arrays(tmp_path / "first.npz")[0].tolist()
    return found


def test_a_budget_is_kept_and_bytes_are_counted(tmp_path: Path) -> None:
    plan(tmp_path)
    (tmp_path / "P.npz").rename(tmp_path / "before.npz")
    flags = ("--current", tmp_path / "before.npz", "--max-moves", 3, "--bytes-per-expert", "1Ki")
    assert plan(tmp_path, *flags, array=load(1)).code == 0
    found = stats(tmp_path)
    assert found["moves"] <= 3
    assert found["bytes"] == found["moves"] * 1024
    old, new = arrays(tmp_path / "before.npz")[0], arrays(tmp_path / "P.npz")[0]
    received = sum(
        len(set(new[at].tolist()) - set(old[at].tolist()) - {-1})
        for at in np.ndindex(LAYERS, RANKS)
    )
    assert found["moves"] == received


def test_dead_and_draining_ranks_get_nothing(tmp_path: Path) -> None:
    plan(tmp_path)
    (tmp_path / "P.npz").rename(tmp_path / "before.npz")
    flags = ("--current", tmp_path / "before.npz", "--dead", "2", "--draining", "5")
    assert plan(tmp_path, *flags).code == 0
    slots, _ = arrays(tmp_path / "P.npz")
    assert (slots[:, [2, 5]] == -1).all()
    assert stats(tmp_path)["moves"] > 0
    assert stats(tmp_path)["waves"] >= 1


def test_slow_ranks_get_less(tmp_path: Path) -> None:
    speeds = saved(tmp_path / "speeds.npy", [1, 1, 1, 1, 0.5, 0.5])
    assert plan(tmp_path, "--speeds", speeds).code == 0
    slots, fractions = arrays(tmp_path / "P.npz")
    tokens = np.where(slots >= 0, np.take_along_axis(
        load()[:, None, :].repeat(RANKS, 1), np.maximum(slots, 0), 2), 0) * fractions  # fmt: skip
    share = tokens.sum(axis=(0, 2)) / tokens.sum()
    assert share == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.1], abs=1e-3)


def test_copies_within_their_limits(tmp_path: Path) -> None:
    assert plan(tmp_path, "--max-copies", 2).code == 0
    slots, _ = arrays(tmp_path / "P.npz")
    counts = [np.bincount(layer[layer >= 0], minlength=EXPERTS) for layer in slots]
    assert np.max(counts) == 2
    assert np.min(counts) >= 1


def test_ranks_with_slots_of_their_own(tmp_path: Path) -> None:
    path = saved(tmp_path / "L.npy", load())
    done = moe_plan(
        "plan", "--load", path, "--ranks", 4, "--slots-per-rank", "8,6,4,2",
        "--output", tmp_path / "P.npz",
    )  # fmt: skip
    assert done.code == 0
    slots, _ = arrays(tmp_path / "P.npz")
    assert ((slots >= 0).sum(axis=2) <= [8, 6, 4, 2]).all()


def test_layers_of_different_sizes(tmp_path: Path) -> None:
    np.savez(tmp_path / "L.npz", load=[[3.0, 2, 1, 1], [5, 1, 0, 0]], experts=[4, 2])
    done = moe_plan(
        "plan", "--load", tmp_path / "L.npz", "--ranks", 2, "--slots-per-rank", 3,
        "--output", tmp_path / "P.npz", "--json",
    )  # fmt: skip
    assert done.code == 0
    assert [layer["bound"] for layer in done.json["layers"]] == [3.5, 3]
    assert done.json["gap_worst"] <= 1e-4
    slots, _ = arrays(tmp_path / "P.npz")
    assert set(slots[0].ravel()) >= {0, 1, 2, 3}
    assert set(slots[1].ravel()) <= {-1, 0, 1}


def test_a_load_of_zero_is_perfect_and_never_nan(tmp_path: Path) -> None:
    assert plan(tmp_path, array=np.zeros((LAYERS, EXPERTS))).code == 0
    found = stats(tmp_path)
    assert (found["gap_worst"], found["imbalance"]) == (0, 1)
    assert "NaN" not in (tmp_path / "S.json").read_text()


def test_a_plan_as_a_document(tmp_path: Path) -> None:
    assert plan(tmp_path, "--output", tmp_path / "P.json").code == 0
    assert len(GroupPlan.from_json((tmp_path / "P.json").read_bytes()).members) == RANKS


def test_domains_count_what_crosses(tmp_path: Path) -> None:
    done = plan(tmp_path, "--domains", "3,3")
    assert "of assignments leave their domain" in done.out
    assert 0 <= stats(tmp_path)["crossing"] <= 1


def test_domains_keep_tokens_near_unless_unwanted(tmp_path: Path) -> None:
    plan(tmp_path, "--domains", "2,2,2")
    near = stats(tmp_path)
    plan(tmp_path, "--domains", "2,2,2", "--no-near")
    balanced = stats(tmp_path)
    assert near["crossing"] < balanced["crossing"]
    assert balanced["gap_worst"] <= near["gap_worst"] <= 0.0201


def test_copies_spread_over_domains(tmp_path: Path) -> None:
    plan(tmp_path, "--domains", "2,2,2", "--spread", 2, "--min-copies", 1)
    slots, _ = arrays(tmp_path / "P.npz")
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            ranks = np.nonzero(slots[layer] == expert)[0]
            assert len(set(ranks // 2)) >= min(2, len(ranks))


def test_the_table_tells_moves_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan(tmp_path)
    (tmp_path / "P.npz").rename(tmp_path / "before.npz")
    done = plan(tmp_path, "--current", tmp_path / "before.npz", array=load(3))
    lines = done.out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    for words in ("current worst", "planned worst", "gap to the bound", "moves  ", "rank loads"):
        assert words in done.out


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_heat_map(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"heat.{suffix}"
    assert plan(tmp_path, "--plot", path).code == 0
    content = path.read_bytes()
    if suffix == "png":
        assert content.startswith(b"\x89PNG")
    else:
        assert b"in order: imbalance" in content or b"<svg" in content
    plan(tmp_path, "--plot", path)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--ranks", "0"), ("--ranks", "0 must be 1")),
        (("--ranks", "4097"), ("--ranks", "4096")),
        (("--ranks", "x"), ("--ranks", "'x' is no whole number")),
        (("--slots-per-rank", "2"), ("16 experts", "12")),
        (("--slots-per-rank", "0"), ("16 experts",)),
        (("--slots-per-rank", "-1"), ("--slots-per-rank",)),
        (("--slots-per-rank", "4,4"), ("2 entries for 6 ranks",)),
        (("--domains", "3,4"), ("--domains", "7 ranks")),
        (("--dead", "6"), ("--dead", "rank 6", "0 to 5")),
        (("--dead", "0-5"), ("no rank is left",)),
        (("--dead", "0-2"), ("16 experts",)),
        (("--draining", "1-2-3"), ("--draining", "'1-2-3'")),
        (("--speeds", "1,2"), ("--speeds", "6 ranks")),
        (("--split", "odd"), ("--split", "'odd'", "even")),
        (("--max-moves", "-1"), ("--max-moves",)),
        (("--max-moves", "many"), ("--max-moves", "'many'")),
        (("--aim", "nan"), ("--aim", "nan")),
        (("--aim", "x"), ("--aim", "'x'")),
        (("--min-copies", "0"), ("--min-copies",)),
        (("--min-copies", "2"), ("min_copies is 2",)),
        (("--min-copies", "3", "--max-copies", "2"), ("max_copies",)),
        (("--bytes-per-expert", "0"), ("--bytes-per-expert",)),
        (("--bytes-per-expert", "1x"), ("--bytes-per-expert", "'1x'")),
        (("--spare-slots", "65"), ("--spare-slots", "64")),
        (("--current", "missing.npz"), ("--current", "No such file")),
        (("--output", "plan.txt"), ("--output", ".npz")),
        (("--stats", "stats.txt"), ("--stats", ".json")),
        (("--stats", "nowhere/stats.json"), ("--stats", "does not exist")),
        (("--plot", "heat.gif"), ("--plot", ".png or .svg")),
        (("--load", "missing.npy"), ("--load", "No such file")),
        (("--rank", "3"), ("--rank",)),
        (("extra",), ("extra",)),
    ],
)
def test_flags_that_do_not_fit(
    tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    refused(plan(tmp_path, *flags), *words)
    assert not (tmp_path / "P.npz").exists()
    assert not (tmp_path / "S.json").exists()


def test_a_current_plan_of_other_ranks_or_another_model(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", slots=np.zeros((LAYERS, 3, 1), dtype=int))
    refused(plan(tmp_path, "--current", tmp_path / "other.npz"), "--current", "3 ranks")
    np.savez(tmp_path / "other.npz", slots=np.zeros((2, RANKS, 1), dtype=int))
    refused(plan(tmp_path, "--current", tmp_path / "other.npz"), "--current", "2 layers")
    np.savez(tmp_path / "other.npz", slots=np.full((LAYERS, RANKS, 1), 99))
    refused(plan(tmp_path, "--current", tmp_path / "other.npz"), "--current", "expert 99")


@pytest.mark.parametrize("missing", ["--load", "--ranks", "--slots-per-rank"])
def test_flags_that_must_be_given(missing: str) -> None:
    given = {"--load": "L.npy", "--ranks": "2", "--slots-per-rank": "2"}
    flags = [part for flag, value in given.items() if flag != missing for part in (flag, value)]
    refused(moe_plan("plan", *flags), missing, "required")


def test_groups_of_experts_are_kept_in_one_domain(tmp_path: Path) -> None:
    num_experts, num_ranks, num_groups = 64, 8, 8
    tokens = np.random.default_rng(1).lognormal(0, 1, (LAYERS, num_experts)) * 1000
    path = saved(tmp_path / "L.npy", tokens)

    def kept(*flags: object) -> float:
        """Share of an expert group that is found in the domain with most of it, on average."""
        done = moe_plan(
            "plan", "--load", path, "--ranks", num_ranks, "--slots-per-rank", 9,
            "--domains", "4,4", "--output", tmp_path / "P.npz", *flags,
        )  # fmt: skip
        assert done.code == 0, done
        slots, fractions = arrays(tmp_path / "P.npz")
        assert judged(slots, fractions, tokens).max() <= 1.02 + 1e-6, "more than near may cost"
        held = np.zeros((LAYERS, 2, num_experts), dtype=bool)
        for layer, rank, slot in np.argwhere(slots >= 0):
            held[layer, rank // 4, slots[layer, rank, slot]] = True
        return float(held.reshape(LAYERS, 2, num_groups, -1).mean(axis=3).max(axis=1).mean())

    assert kept() < 0.8
    assert kept("--groups", num_groups) > 0.9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--groups", 4], "no --domains"),
        (["--groups", 4, "--domains", "3,3", "--no-near"], "without --near"),
        (["--groups", 4, "--domains", "3,3", "--split", "even"], "--split even"),
        (["--groups", 5, "--domains", "3,3"], "16 experts do not divide into 5 groups"),
        (["--groups", 0, "--domains", "3,3"], "--groups"),
    ],
)
def test_groups_that_bring_nothing_are_refused(
    flags: list[Any], message: str, tmp_path: Path
) -> None:
    done = plan(tmp_path, *flags)
    refused(done, message)
