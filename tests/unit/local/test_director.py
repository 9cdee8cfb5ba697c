"""The operator's part of `moe-worker local`, fed with what ranks would say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_api.load import LoadReport
from moe_api.plan import GroupPlan
from moe_api.worker import ModelShape, WorkerPhase, WorkerState
from moe_placement import score
from moe_placement.decision.decide import Mode, Policy
from moe_placement.split import best_fractions
from moe_worker.local.director import Director, Living, Rules, hung, in_force

SHAPE = ModelShape(layers=2, experts=8, top_k=2, bytes_per_expert=1000, kv_bytes_per_token=10)
RULES = Rules(
    num_ranks=3, spare_slots=1, interval_seconds=5.0, window_seconds=60.0,
    policy=Policy(Mode.AUTO, serving_slots=4, min_gain_percent=5.0, cooldown_seconds=10.0,
                  max_moves_per_round=64),
)  # fmt: skip


class Ranks:
    """Obedient ranks: each runs whatever plan names it, at once, unless the test says otherwise."""

    def __init__(self, count: int = 3) -> None:
        self.living = [self._waiting(i, f"inc-{i}") for i in range(count)]
        self.routed = {i: np.zeros((2, 8), dtype=int) for i in range(count)}

    def _waiting(self, member: int, incarnation: str) -> Living:
        state = WorkerState(
            incarnation=incarnation, member=member, phase=WorkerPhase.WAITING, model=SHAPE
        )
        return Living(member, incarnation, f"127.0.0.{2 + member}", state, None)

    def run(self, plan: GroupPlan | None) -> None:
        if plan is None:
            return
        named = {m.incarnation for m in plan.members}
        self.living = [
            self._told(
                rank, phase=WorkerPhase.SERVING, generation=plan.generation,
                applied_epoch=plan.epoch, prepared_generation=plan.generation,
            )
            if rank.incarnation in named else rank
            for rank in self.living
        ]  # fmt: skip

    def say(self, member: int, **changes: object) -> None:
        self.living = [
            self._told(rank, **changes) if rank.member == member else rank for rank in self.living
        ]

    def kill(self, member: int) -> None:
        self.living = [rank for rank in self.living if rank.member != member]

    def come_back(self, member: int) -> None:
        self.living.append(self._waiting(member, f"inc-{member}b"))

    def count(self, expert: int, tokens: int) -> None:
        """Every rank's own requests chose this expert so often, in both layers."""
        for routed in self.routed.values():
            routed[:, expert] += tokens

    def report(self) -> list[Living]:
        return [
            replace(
                rank,
                load=LoadReport(
                    incarnation=rank.incarnation, member=rank.member,
                    generation=rank.state.generation if rank.state else 0,
                    epoch=rank.state.applied_epoch if rank.state else 0, monotonic_seconds=0.0,
                    routed=self.routed[rank.member].tolist(), served=[[0] * 5] * 2,
                ),
            )
            for rank in self.living
        ]  # fmt: skip

    def _told(self, rank: Living, **changes: object) -> Living:
        assert rank.state is not None
        return replace(rank, state=rank.state.model_copy(update=changes))


def serving(rules: Rules = RULES) -> tuple[Director, Ranks, GroupPlan]:
    director, ranks = Director(rules), Ranks()
    plan = director.look(ranks.report(), 0.0)
    assert plan is not None
    ranks.run(plan)
    assert director.look(ranks.report(), 1.0) == plan
    return director, ranks, plan


def test_a_group_is_formed_when_all_wait() -> None:
    director, ranks = Director(RULES), Ranks(2)
    assert director.look(ranks.report(), 0.0) is None
    director, ranks, plan = serving()
    assert [member.id for member in plan.members] == [0, 1, 2]
    assert plan.slots().shape == (2, 3, 5)
    assert plan.generation == plan.epoch == 1


def test_survivors_go_on_at_once_and_the_replacement_joins_when_it_waits() -> None:
    director, ranks, _ = serving()
    ranks.kill(1)
    survivors = director.look(ranks.report(), 2.0)
    assert survivors is not None
    assert [member.id for member in survivors.members] == [0, 2]
    assert survivors.generation == 2
    assert set(np.unique(survivors.slots()[0])) >= set(range(8))
    ranks.run(survivors)
    assert director.look(ranks.report(), 3.0) == survivors
    ranks.come_back(1)
    again = director.look(ranks.report(), 4.0)
    assert again is not None
    assert [member.incarnation for member in again.members] == ["inc-0", "inc-1b", "inc-2"]
    assert again.generation == 3


def test_without_room_for_all_experts_the_survivors_wait_for_the_replacement() -> None:
    rules = replace(RULES, spare_slots=0, policy=replace(RULES.policy, serving_slots=3))
    director, ranks = Director(rules), Ranks()
    plan = director.look(ranks.report(), 0.0)
    ranks.run(plan)
    director.look(ranks.report(), 1.0)
    ranks.kill(1)
    assert director.look(ranks.report(), 2.0) == plan
    assert "waiting for its replacement" in director.event
    ranks.come_back(1)
    again = director.look(ranks.report(), 3.0)
    assert again is not None
    assert again.generation == 2
    assert again.members[1].incarnation == "inc-1b"


def test_a_generation_that_all_members_call_broken_is_formed_anew() -> None:
    director, ranks, plan = serving()
    for member in range(3):
        assert director.look(ranks.report(), 2.0) == plan
        ranks.say(member, phase=WorkerPhase.DISRUPTED)
    again = director.look(ranks.report(), 3.0)
    assert again is not None
    assert again.generation == 2
    assert again.members == plan.members
    assert np.array_equal(again.slots(), plan.slots())


def walk(director: Director, ranks: Ranks, start: float) -> list[GroupPlan]:
    """Look once a second, ranks obeying, until no new plan comes for a while."""
    plans: list[GroupPlan] = []
    for second in range(40):
        plan = director.look(ranks.report(), start + second)
        assert plan is not None
        if not plans or plan != plans[-1]:
            plans.append(plan)
        ranks.run(plan)
    return plans


def test_a_hot_expert_leads_to_a_walk_of_epochs_and_then_to_rest() -> None:
    one_move = replace(RULES, policy=replace(RULES.policy, max_moves_per_round=1))
    director, ranks, _ = serving(one_move)
    for expert in range(8):
        ranks.count(expert, 4000 if expert == 0 else 500)
    plans = walk(director, ranks, 10.0)
    assert len(plans) > 1
    assert {plan.generation for plan in plans} == {1}
    assert [plan.epoch for plan in plans] == list(range(2, len(plans) + 2))
    assert plans[0].previous is not None
    assert plans[0].previous.epoch == 1
    assert (plans[-1].slots() == 0).sum() > 2, "the hot expert has got copies"
    assert director.applied_epoch == plans[-1].epoch
    load = np.asarray([[4000.0] + [500] * 7] * 2)
    loads = score.rank_loads(plans[-1].slots(), plans[-1].fractions(), load)
    assert loads.max() / loads.mean() < 1.03, "fractions make up what copies leave"


def test_survivors_split_by_the_load_of_the_window() -> None:
    director, ranks = Director(replace(RULES, spare_slots=3)), Ranks()
    ranks.run(director.look(ranks.report(), 0.0))
    director.look(ranks.report(), 1.0)
    for expert in range(8):
        ranks.count(expert, 4000 if expert == 0 else 500)
    plans = walk(director, ranks, 10.0)
    ranks.kill(2)
    survivors = director.look(ranks.report(), 50.0)
    assert survivors is not None
    assert survivors.generation == plans[-1].generation + 1
    load = np.asarray([[4000.0] + [500] * 7] * 2)
    loads = score.rank_loads(survivors.slots(), survivors.fractions(), load)
    best = best_fractions(load, survivors.slots(), np.ones(2))
    assert loads.max() == pytest.approx(
        score.rank_loads(survivors.slots(), best, load).max(), rel=1e-3
    )


def test_without_traffic_the_plan_stays() -> None:
    director, ranks, plan = serving()
    assert walk(director, ranks, 10.0) == [plan]
    assert "NoTraffic" in director.event


def test_an_abandoned_epoch_ends_the_walk_and_the_next_numbers_go_on() -> None:
    director, ranks, _ = serving()
    for expert in range(8):
        ranks.count(expert, 4000 if expert == 0 else 500)
    wave = director.look(ranks.report(), 10.0)
    assert wave is not None
    assert wave.epoch == 2
    for member in range(3):
        ranks.say(member, abandoned_epoch=2)
    assert all(in_force(wave, rank.state) for rank in ranks.living if rank.state)
    assert director.look(ranks.report(), 11.0) == wave
    assert "abandoned" in director.event
    assert director.applied_epoch == 1
    for expert in range(8):
        ranks.count(expert, 4000 if expert == 0 else 500)
    following = director.look(ranks.report(), 30.0)
    assert following is not None
    assert following.epoch == 3
    assert following.previous is not None
    assert following.previous.epoch == 1


def test_a_member_that_answers_nobody_is_hung_but_one_that_starts_is_not() -> None:
    director, ranks, plan = serving()
    ranks.living = [replace(r, state=None) if r.member == 1 else r for r in ranks.living]
    assert hung(plan, ranks.living) == [], "nobody else has missed it"
    ranks.say(0, suspects=[1])
    assert hung(plan, ranks.living) == [1]
    ranks.kill(1)
    ranks.come_back(1)
    ranks.living = [replace(r, state=None) if r.member == 1 else r for r in ranks.living]
    assert hung(plan, ranks.living) == []
    assert hung(None, ranks.living) == []
    assert director.plan == plan
