"""Reasons that `explain` gives, on cases small enough to check by hand; and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moe_placement import shortfall
from moe_placement.capacity import Capacity
from moe_placement.copy_limits import CopyLimits
from moe_placement.explain import explain_expert, explain_layer
from moe_placement.placement import Placement
from moe_placement.shortfall import Demands
from moe_placement.split import best_fractions
from tests.support.moe_plan import moe_plan, refused

TWO = Capacity.of(2, 2)
HOT = np.array([[60.0, 30.0, 10.0]])
HOT_SLOTS = np.array([[[0, 1], [0, 2]]], dtype=np.int32)
BALANCED = Placement(HOT_SLOTS, np.array([[[1 / 3, 1], [2 / 3, 1]]]))


def placed(slots: object, load: np.ndarray, capacity: Capacity) -> Placement:
    slots_LRS = np.array(slots, dtype=np.int32)
    return Placement(slots_LRS, best_fractions(load, slots_LRS, capacity.speeds_R))


def test_a_perfect_layer_gives_up_nothing() -> None:
    story = explain_layer(BALANCED, HOT, TWO, 0)
    assert (story.fair, story.bound, story.largest) == (50, 50, pytest.approx(50))
    assert story.limits == ()
    assert story.given_up == ()
    assert story.crossing is None


def test_a_hot_expert_needs_its_copies() -> None:
    story = explain_expert(BALANCED, HOT, TWO, 0, 0)
    assert (story.needed, story.times_fair) == (2, pytest.approx(1.2))
    assert "needs 2 copies or more, it has 2" in story.why
    assert [copy.tokens for copy in story.copies] == [pytest.approx(20), pytest.approx(40)]
    # Without its copy on rank 0, rank 1 would have 60 + 10; without that on rank 1, rank 0 90.
    assert story.copies[0].why == "without it the fullest rank would carry 40.0% more"
    assert story.copies[1].why == "without it the fullest rank would carry 80.0% more"


def test_a_cool_expert_fits_on_one_rank() -> None:
    story = explain_expert(BALANCED, HOT, TWO, 0, 2)
    assert story.why.endswith("it fits on one")
    assert [copy.why for copy in story.copies] == ["the only copy"]


def test_a_piece_fills_up_a_rank_that_has_room() -> None:
    load = np.array([[40.0, 40.0, 20.0]])
    placement = placed([[[0, 2], [1, 2]]], load, TWO)
    story = explain_expert(placement, load, TWO, 0, 2)
    assert "pieces fill up ranks that have room" in story.why
    assert all(copy.why.startswith("without it") for copy in story.copies)


def test_an_idle_copy_says_who_asked_for_it() -> None:
    load = np.array([[50.0, 50.0]])
    slots = np.array([[[0, 1], [1, 0]]], dtype=np.int32)
    placement = Placement(slots, np.array([[[1.0, 0], [1, 0]]]))
    assert explain_expert(placement, load, TWO, 0, 0).copies[1].why.startswith("stands by")
    asked = Demands(CopyLimits(min_copies=2))
    assert "minReplicas" in explain_expert(placement, load, TWO, 0, 0, asked).copies[1].why
    apart = Capacity.of(2, 2, domains=[0, 1])
    story = explain_expert(placement, load, apart, 0, 0, Demands(min_domains=2))
    assert "keeps copies in 2 domains" in story.copies[1].why


def test_an_expert_without_tokens_or_without_a_copy() -> None:
    load = np.array([[50.0, 0.0, 5.0]])
    placement = Placement.even(np.array([[[0, 1], [0, -1]]], dtype=np.int32))
    assert explain_expert(placement, load, TWO, 0, 1).why.startswith("no tokens")
    assert "no copy" in explain_expert(placement, load, TWO, 0, 2).why


def test_an_even_split_is_told_what_fractions_would_bring() -> None:
    story = explain_layer(Placement.even(HOT_SLOTS), HOT, TWO, 0)
    assert story.largest == 60
    assert story.given_up == (
        "other fractions alone, without a move, would bring the fullest rank from 60 to 50",
    )


def test_copies_of_an_even_split_are_judged_by_an_even_split() -> None:
    story = explain_expert(Placement.even(HOT_SLOTS), HOT, TWO, 0, 0)
    # 60 now; 90 and 70 without one of the copies.
    assert [copy.why[-10:] for copy in story.copies] == ["16.7% more", "50.0% more"]


def test_ranks_that_no_split_relieves_are_named() -> None:
    load = np.array([[40.0, 40.0, 10.0, 10.0]])
    placement = placed([[[0, 1], [2, 3]]], load, TWO)
    story = explain_layer(placement, load, TWO, 0)
    assert story.largest == 80
    assert any("rank 0 holds all copies of 2 experts" in line for line in story.given_up)


def test_the_bottleneck_proves_what_the_best_split_reaches() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        load = rng.lognormal(0, 1.5, (1, 12))
        slots = np.stack([rng.permutation(12)[:5] for _ in range(4)])[None].astype(np.int32)
        slots[0, :, 0] = np.array([0, 3, 6, 9])
        for expert in range(12):
            if not (slots == expert).any():
                load[0, expert] = 0
        for rank in range(4):
            row = slots[0, rank]
            row[1:][np.isin(row[1:], row[0])] = -1
        capacity = Capacity.of(5, 4, speeds=[1, 0.7, 1, 1.3])
        placement = placed(slots, load, capacity)
        found = shortfall.bottleneck(placement, load, capacity.speeds_R)
        largest = shortfall.largest(placement, load, capacity.speeds_R)
        assert found.level == pytest.approx(largest, rel=1e-5)
        outside = [rank for rank in range(4) if rank not in found.ranks]
        assert not np.isin(slots[0, outside], found.experts).any()


def test_an_expert_too_hot_for_all_ranks_sets_the_bound() -> None:
    load = np.array([[90.0, 4.0, 3.0, 3.0]])
    capacity = Capacity.of(2, 3)
    asked = Demands(CopyLimits(max_copies=2))
    placement = placed([[[0, 1], [0, 2], [3, -1]]], load, capacity)
    story = explain_layer(placement, load, capacity, 0, asked)
    assert story.bound == pytest.approx(45)
    assert "expert 0 has 90.0% of the tokens: on 2 ranks" in story.limits[0]
    assert any("from 1 to 2 copies, as asked" in line for line in story.given_up)
    expert = explain_expert(placement, load, capacity, 0, 0, Demands())
    assert "it would need 3 copies, it has 2" in expert.why


def test_as_many_slots_as_experts_set_the_bound() -> None:
    load = np.array([[40.0, 30.0, 20.0, 10.0]])
    story = explain_layer(placed([[[0, 3], [1, 2]]], load, TWO), load, TWO, 0)
    assert story.given_up == ()
    uneven = np.array([[90.0, 5.0, 4.0, 1.0]])
    story = explain_layer(placed([[[0, 3], [1, 2]]], uneven, TWO), uneven, TWO, 0)
    assert story.limits == (
        "as many slots as experts: each has one copy, and nothing can be split",
    )


def test_too_few_slots_for_the_hot_experts_set_the_bound() -> None:
    load = np.array([[50.0, 50.0, 0.0, 0.0, 0.0, 0.0]])
    capacity = Capacity.of(2, 4)
    placement = placed([[[0, 2], [0, 3], [1, 4], [1, 5]]], load, capacity)
    assert explain_layer(placement, load, capacity, 0).limits == ()
    hotter = np.array([[80.0, 20.0, 0.0, 0.0, 0.0, 0.0]])
    capacity = Capacity.of([2, 2, 2, 1], 4)
    placement = placed([[[0, 2], [0, 3], [1, 4], [5, -1]]], hotter, capacity)
    assert (
        "the experts need 9 slots, there are 7"
        in (explain_layer(placement, hotter, capacity, 0).limits[0])
    )


def test_copies_that_are_not_spread_are_named() -> None:
    load = np.array([[60.0, 20.0, 20.0]])
    capacity = Capacity.of(2, 4, domains=[0, 0, 1, 1])
    placement = placed([[[0, -1], [0, -1], [1, -1], [2, -1]]], load, capacity)
    story = explain_layer(placement, load, capacity, 0, Demands(min_domains=2))
    assert "the copies of expert 0 are in fewer than 2 domains" in story.given_up


def test_tokens_stay_in_their_domain_as_far_as_copies_reach() -> None:
    load = np.array([[80.0, 20.0]])
    capacity = Capacity.of(2, 2, domains=[0, 1])
    placement = Placement(
        np.array([[[0, 1], [0, -1]]], dtype=np.int32), np.array([[[0.25, 1.0], [0.75, 0]]])
    )
    story = explain_expert(placement, load, capacity, 0, 0)
    assert [sent.tokens for sent in story.sent] == [40, 40]
    assert story.sent[0].shares == pytest.approx((0.5, 0.5))
    assert story.sent[1].shares == pytest.approx((0.0, 1.0))
    layer = explain_layer(placement, load, capacity, 0)
    assert layer.crossing == pytest.approx(0.3)


def test_balance_that_was_given_up_for_nearness_is_told() -> None:
    load = np.array([[80.0, 20.0]])
    capacity = Capacity.of(2, 2, domains=[0, 1])
    placement = Placement(
        np.array([[[0, 1], [0, -1]]], dtype=np.int32), np.array([[[0.5, 1.0], [0.5, 0]]])
    )
    (told,) = explain_layer(placement, load, capacity, 0).given_up
    # Balanced, a tenth of the tokens would have to go from domain 0 to the copy of domain 1.
    assert "from 60 to 50, and let 20.0% instead of 10.0% of the tokens leave" in told


def test_a_layer_without_tokens_has_nothing_to_explain() -> None:
    load = np.zeros((1, 3))
    story = explain_layer(BALANCED, load, TWO, 0)
    assert (story.bound, story.largest, story.limits, story.given_up) == (0, 0, (), ())
    assert explain_expert(BALANCED, load, TWO, 0, 0).why.startswith("no tokens")


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    np.save(tmp_path / "load.npy", HOT)
    np.savez(tmp_path / "plan.npz", slots=HOT_SLOTS, fractions=BALANCED.fractions_LRS)
    return tmp_path / "plan.npz", tmp_path / "load.npy"


def test_the_command_explains_layers_experts_and_copies(files: tuple[Path, Path]) -> None:
    plan, load = files
    assert "1 of 1 layers give up nothing" in moe_plan("explain", plan, "--load", load).out
    one = moe_plan("explain", plan, "--load", load, "--layer", 0).out
    assert "too hot for one" in one
    assert "0:33% 1:67%" in one
    expert = moe_plan("explain", plan, "--load", load, "--layer", 0, "--expert", 0).out
    assert "needs 2 copies or more" in " ".join(expert.split())
    assert "the fullest rank would carry 40.0% more" in " ".join(expert.split())


def test_the_command_explains_to_programs(files: tuple[Path, Path]) -> None:
    plan, load = files
    found = moe_plan("explain", plan, "--load", load, "--json").json
    assert found["layers"][0]["bound"] == 50
    assert found["anew"] == {"gap_worst_now": 0, "gap_worst": 0, "moves": 0}
    found = moe_plan("explain", plan, "--load", load, "--layer", 0, "--json").json
    assert [expert["expert"] for expert in found["experts"]] == [0, 1, 2]


def test_what_a_plan_without_a_budget_would_bring(tmp_path: Path) -> None:
    np.save(tmp_path / "load.npy", np.array([[40.0, 40.0, 10.0, 10.0]]))
    np.savez(tmp_path / "plan.npz", slots=[[[0, 1], [2, 3]]])
    flags = ("explain", tmp_path / "plan.npz", "--load", tmp_path / "load.npy")
    assert moe_plan(*flags, "--json").json["anew"] == {
        "gap_worst_now": pytest.approx(0.6),
        "gap_worst": pytest.approx(0.0),
        "moves": 2,
    }
    assert "planned anew: 0.00 % above the bound instead of 60.00 %, for 2 moves" in (
        " ".join(moe_plan(*flags).out.split())
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--layer", 1), ("--layer 1", "layers are 0 to 0")),
        (("--layer", 0, "--expert", 3), ("--expert 3", "0 to 2")),
        (("--expert", 1), ("--expert 1", "--layer")),
        (("--layer", -1), ("--layer", "-1")),
        (("--min-copies", 3, "--max-copies", 2), ("max_copies is 2",)),
        (("--domains", "1,2"), ("--domains", "3 ranks", "there are 2")),
    ],
)
def test_what_can_not_be_explained(
    files: tuple[Path, Path], flags: tuple[object, ...], words: tuple[str, ...]
) -> None:
    plan, load = files
    refused(moe_plan("explain", plan, "--load", load, *flags), *words)
