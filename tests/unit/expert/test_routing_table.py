from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_api.plan import GroupPlan, Member, encode_layers, even_fractions
from moe_worker.expert.routing_table import RoutingTable, Turns, turns

UNEVEN = (0.62, 0.25, 0.13)


def slots(*ranks: list[int]) -> np.ndarray:
    return np.asarray([list(ranks)], dtype=np.int32)


def even_table(placement: np.ndarray, num_experts: int, member: int = 0) -> RoutingTable:
    return RoutingTable.build(placement, even_fractions(placement), num_experts, member)


def copies_of_one(
    shares: tuple[float, ...] | np.ndarray, num_experts: int = 1, num_layers: int = 1,
    member: int = 0,
) -> RoutingTable:  # fmt: skip
    """Every expert on every rank, slot e of rank r = copy r, with these shares."""
    placement = np.tile(
        np.arange(num_experts, dtype=np.int32), (num_layers, len(shares), 1)
    ).reshape(num_layers, len(shares), num_experts)
    fractions = np.broadcast_to(
        np.asarray(shares, dtype=np.float64).reshape(1, -1, 1), placement.shape
    )
    return RoutingTable.build(placement, fractions, num_experts, member)


def zeros(num_experts: int = 1) -> torch.Tensor:
    return torch.zeros(num_experts, dtype=torch.int64)


def send(
    table: RoutingTable,
    counts: torch.Tensor,
    ids: list[int] | torch.Tensor,
    layer: int = 0,
    step: int = 0,
) -> list[int]:
    """Map one-choice tokens and advance the counts, as a committed step does."""
    column = torch.as_tensor(ids).reshape(-1, 1)
    physical, chosen, _ = table.to_physical(layer, column, counts, step)
    counts += chosen
    return physical.reshape(-1).tolist()


def bound(num_tokens: int) -> float:
    """How far a copy's count may be off its share among so many tokens in a row: the discrepancy
    of intervals under the golden rotation."""
    return 1.5 + 0.5 * float(np.log1p(num_tokens))


def test_an_expert_goes_to_the_slot_that_holds_it() -> None:
    table = even_table(slots([2, 0, -1], [3, 1, -1]), 4)
    assert send(table, zeros(4), [0, 1, 2, 3]) == [1, 4, 0, 3]


def test_ids_that_name_no_expert_go_nowhere_and_are_not_counted() -> None:
    table = even_table(slots([0, 1], [1, 2]), 3)
    ids = torch.tensor([[0, -1], [3, 2], [2**31 - 1, -7]])
    physical, chosen, strangers = table.to_physical(0, ids, zeros(3), 0)
    assert strangers == 3
    assert physical.tolist() == [[0, -1], [-1, 3], [-1, -1]]
    assert chosen.tolist() == [1, 0, 1]


def test_no_tokens() -> None:
    physical, chosen, _ = copies_of_one(UNEVEN).to_physical(
        0, torch.zeros((0, 2), dtype=torch.int64), zeros(), 0
    )
    assert physical.shape == (0, 2)
    assert chosen.tolist() == [0]


@settings(max_examples=60)
@given(
    shares=st.lists(st.integers(0, 10), min_size=2, max_size=5).filter(lambda s: sum(s) > 0),
    pieces=st.lists(st.integers(1, 400), min_size=1, max_size=60),
    before=st.integers(0, 2**40),
    member=st.integers(0, 1023),
)
def test_copies_get_their_shares_in_batches_of_any_size(
    shares: list[int], pieces: list[int], before: int, member: int
) -> None:
    """Among N tokens in a row a copy is off its share by O(log N), wherever the row begins and
    however it is cut into batches."""
    fractions = np.asarray(shares) / sum(shares)
    table = copies_of_one(fractions, member=member)
    counts = zeros() + before
    got, num_tokens = np.zeros(len(shares)), 0
    for step, piece in enumerate(pieces):
        sent = np.bincount(send(table, counts, [0] * piece, step=step), minlength=len(shares))
        assert np.all(np.abs(sent - fractions * piece) <= bound(piece)), "within the batch"
        got, num_tokens = got + sent, num_tokens + piece
        assert np.all(np.abs(got - fractions * num_tokens) <= bound(num_tokens)), "summed up"
    assert all(got[copy] == 0 for copy, share in enumerate(shares) if share == 0)


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_shares_come_out_over_very_many_tiny_batches(batch: int) -> None:
    table, counts = copies_of_one(UNEVEN), zeros()
    got = np.zeros(3)
    for _ in range(4000):
        got += np.bincount(send(table, counts, [0] * batch), minlength=3)
    assert np.abs(got / got.sum() - UNEVEN).max() < bound(4000 * batch) / (4000 * batch)


def test_one_big_batch_gets_its_shares() -> None:
    sent = np.bincount(send(copies_of_one(UNEVEN), zeros(), [0] * 100_000), minlength=3)
    assert np.abs(sent / 100_000 - UNEVEN).max() < 1e-4


@pytest.mark.parametrize("member", [0, 3])
def test_what_is_sent_does_not_depend_on_how_tokens_are_batched(member: int) -> None:
    """A chunked prompt sends as many tokens to each copy as the whole one."""
    table = even_table(slots([0, 1], [0, -1], [0, 1]), 2, member)
    ids = torch.randint(0, 2, (50,), generator=torch.Generator().manual_seed(1))
    counts = zeros(2)
    one_by_one = [send(table, counts, [expert])[0] for expert in ids.tolist()]
    assert sorted(send(table, zeros(2), ids)) == sorted(one_by_one)


@pytest.mark.parametrize("batch", [2, 8, 13, 55, 144, 987])
def test_no_place_in_the_batch_is_tied_to_a_copy(batch: int) -> None:
    """Also where the batch's size is a Fibonacci number, by which the golden rotation hardly
    moves: the first and the last token of every batch see the copies by their shares."""
    table, counts, rounds = copies_of_one(UNEVEN), zeros(), 400
    sent = np.asarray([send(table, counts, [0] * batch, step=step) for step in range(rounds)])
    for place in (0, batch // 2, batch - 1):
        seen = np.bincount(sent[:, place], minlength=3) / rounds
        assert np.abs(seen - UNEVEN).max() < 0.08, (place, seen)


@pytest.mark.parametrize(("ahead", "most"), [(0, 6), (1, 9), (2, 9), (5, 9)])
def test_ranks_share_out_a_step_of_one_token_each(ahead: int, most: int) -> None:
    """Decode: each rank sends one token a step to the same hot expert. In step or each `ahead` of
    the one before, they never all choose the same copy, and the sums are right."""
    num_ranks, steps = 16, 120
    tables = [copies_of_one((0.25,) * 4, member=member) for member in range(num_ranks)]
    counts = [zeros() + ahead * (num_ranks - rank) for rank in range(num_ranks)]
    sent = np.asarray(
        [[send(t, c, [0])[0] for t, c in zip(tables, counts, strict=True)] for _ in range(steps)]
    )
    per_step = np.asarray([np.bincount(row, minlength=4) for row in sent])
    assert per_step.max() <= most, "a fair copy serves 4 of 16 in every single step"
    assert np.abs(per_step.sum(axis=0) - num_ranks * steps / 4).max() < num_ranks * 2


def test_experts_that_always_occur_together_are_not_in_phase() -> None:
    """Eight experts, each with a copy on both ranks, all chosen by every token."""
    table, counts = copies_of_one((0.5, 0.5), num_experts=8), zeros(8)
    on_first = []
    for step in range(1000):
        physical, chosen, _ = table.to_physical(0, torch.arange(8).reshape(1, 8), counts, step)
        counts += chosen
        on_first.append(int((physical < 8).sum()))
    assert np.mean(on_first) == pytest.approx(4.0, abs=0.05)
    assert max(on_first) < 8
    assert min(on_first) > 0
    assert np.std(on_first) < 2.0, "alike they would all go to one rank: 4"


def test_layers_and_cold_experts_do_not_favour_the_first_copy() -> None:
    """The first token ever of each of many experts and layers."""
    num_layers, num_experts = 60, 64
    table = copies_of_one((0.5, 0.5), num_experts, num_layers)
    ids = list(range(num_experts))
    first = np.asarray([send(table, zeros(num_experts), ids, layer) for layer in range(num_layers)])
    on_first = (first < num_experts).mean(axis=1)
    assert np.abs(on_first - 0.5).max() < 0.25, "each layer"
    assert on_first.mean() == pytest.approx(0.5, abs=0.03)
    assert np.abs((first < num_experts).mean(axis=0) - 0.5).max() < 0.3, "each expert over layers"


def test_members_begin_with_different_copies() -> None:
    first = {send(copies_of_one((1 / 3,) * 3, member=m), zeros(), [0])[0] for m in range(4)}
    assert first == {0, 1, 2}


def test_many_experts_at_once_keep_rank_loads_near_the_plan() -> None:
    """A decode batch over 64 experts with two copies each: the ranks' sums stay near their plan."""
    rng = np.random.default_rng(5)
    placement = np.stack(
        [np.concatenate([np.arange(64), rng.permutation(64)]).reshape(8, 16)]
    ).astype(np.int32)
    tables = [even_table(placement, 64, member) for member in range(8)]
    counts = [zeros(64) for _ in range(8)]
    load, routed = np.zeros(8), np.zeros(64)
    for step in range(200):
        for rank in range(8):
            ids = np.random.default_rng((step, rank)).integers(0, 64, (4, 2))
            physical, chosen, _ = tables[rank].to_physical(
                0, torch.from_numpy(ids), counts[rank], step
            )
            counts[rank] += chosen
            routed += chosen.numpy()
            load += np.bincount(physical.numpy().ravel() // 16, minlength=8)
    planned = np.zeros(8)
    np.add.at(planned, np.repeat(np.arange(8), 16), routed[placement.ravel()] / 2)
    # 512 copies' roundings of at most one token or so each, 16 slots and 8 senders to a rank.
    assert np.abs(load - planned).max() < 0.02 * planned.mean()


def plan_on_two_hosts(sources: list[int] | None) -> GroupPlan:
    """One expert on each of four ranks, two on each host."""
    members = [
        Member(id=10 + r, pod="p", uid=f"u{r}", address="a", incarnation="i",
               domains=["zone", f"host-{r // 2}"])
        for r in range(4)
    ]  # fmt: skip
    return GroupPlan(
        namespace="n", deployment="d", group=0, leader_epoch=1, generation=1, epoch=1,
        members=members, layers=encode_layers(slots([0], [0], [0], [0])), sources=sources,
    )  # fmt: skip


def test_near_copies_come_first_when_the_plan_says_whose_tokens_come() -> None:
    for rank in range(4):
        table = RoutingTable.of_plan(plan_on_two_hosts([16384] * 4), rank, 1)
        sent = np.bincount(send(table, zeros(), [0] * 400), minlength=4)
        own = [200, 200, 0, 0] if rank < 2 else [0, 0, 200, 200]
        assert np.abs(sent - own).max() <= bound(400), "all stay on their host"


def test_all_together_the_fractions_hold() -> None:
    """Three quarters of the tokens come in on the first host: what its copies may serve stays."""
    plan = plan_on_two_hosts([24576, 24576, 8192, 8192])
    sent = np.zeros(4)
    for rank, tokens in enumerate((3000, 3000, 1000, 1000)):
        sent += np.bincount(send(RoutingTable.of_plan(plan, rank, 1), zeros(), [0] * tokens))
    assert np.abs(sent - 2000).max() <= 4 * bound(3000)


def test_without_sources_every_rank_keeps_to_the_fractions_by_itself() -> None:
    for rank in range(4):
        table = RoutingTable.of_plan(plan_on_two_hosts(None), rank, 1)
        sent = np.bincount(send(table, zeros(), [0] * 400), minlength=4)
        assert np.abs(sent - 100).max() <= bound(400)


def test_layers_have_their_own_copies() -> None:
    placement = np.asarray([[[0, 1], [2, -1]], [[2, 0], [1, 0]]], dtype=np.int32)
    table = even_table(placement, 3)
    assert [layer.physical_EC.shape[1] for layer in table.copies_L] == [1, 2]
    ids = torch.tensor([[0], [1], [2]])
    assert table.to_physical(0, ids, zeros(3), 0)[0].tolist() == [[0], [1], [2]]
    assert table.to_physical(1, ids, zeros(3), 0)[0].reshape(-1).tolist()[1:] == [2, 0]


def test_an_expert_without_a_slot_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"layer 0: no slot holds experts \[1\]"):
        even_table(slots([0], [2]), 3)


def test_a_stranger_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"experts \[5\], the model has 0 to 1"):
        even_table(slots([0, 1], [5, -1]), 2)


def test_turns_made_ahead_are_those_of_each_step() -> None:
    made = Turns(3, 2)
    for step in (0, 1, 63, 64, 65, 200, 199, 0, 1 << 40):
        assert np.array_equal(made.of(step), turns(3, 2, step)[0])
    assert len(np.unique(turns(0, 8, 0, 50))) == 8 * 50
