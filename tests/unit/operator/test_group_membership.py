"""Who is in the next plan: forming, losses, newcomers, leavers; exact cases by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moe_api.worker import WorkerPhase
from moe_operator import plans
from moe_operator.actions import CreatePod, StorePlan
from moe_operator.groups import listeners
from moe_operator.members import MemberState
from moe_operator.rules import GroupView, Intent
from moe_placement import score
from moe_placement.placement import Placement
from tests.support.group_views import (
    OLD_HASH,
    decided,
    ended,
    plan_of,
    pod,
    rows,
    rules,
    serving_group,
    silent,
    stored,
    waiting,
    with_pods,
    worker,
)

DISRUPTED = WorkerPhase.DISRUPTED


def members_of(outcome_plan):
    return [(m.id, m.uid) for m in outcome_plan.members]


def test_a_group_forms_when_every_wanted_worker_waits():
    pods = tuple(pod(m, waiting(f"u{m}", m)) for m in range(3))
    outcome = decided(GroupView(0, pods))
    [action] = outcome.actions
    assert isinstance(action, StorePlan)
    assert (action.plan.generation, action.plan.epoch, action.plan.leader_epoch) == (1, 1, 1)
    assert members_of(action.plan) == [(0, "u0"), (1, "u1"), (2, "u2")]
    assert rows(action.plan) == [[0, 1, -1], [2, 3, -1], [4, 5, -1]]
    assert listeners(outcome.view, action.plan) == list(pods)


@pytest.mark.parametrize(
    "missing",
    [
        pod(2),  # starts: no answer yet
        pod(2, worker("u2", 2, WorkerPhase.LOADING, generation=0, epoch=0)),
        pod(2, waiting("u2", 2), deleting=True),
        pod(2, waiting("u2", 2), template_hash=OLD_HASH, deleting=True),
        ended(2, "u2"),
    ],
)
def test_a_group_does_not_form_while_one_of_its_workers_does_not_wait(missing):
    view = GroupView(0, (pod(0, waiting("u0", 0)), pod(1, waiting("u1", 1)), missing))
    assert decided(view).plan is None


def test_a_serving_group_needs_nothing():
    outcome = decided(serving_group())
    assert outcome.actions == ()
    assert outcome.settled
    assert listeners(outcome.view, outcome.plan) == []


def test_survivors_get_the_next_generation_at_once_and_keep_their_slots():
    outcome = decided(with_pods(serving_group(), gone=[1]))
    first, second = outcome.actions
    assert isinstance(first, StorePlan)
    assert (first.plan.generation, first.plan.epoch) == (2, 2)
    assert members_of(first.plan) == [(0, "u0"), (2, "u2")]
    assert rows(first.plan) == [[0, 1, 2], [4, 5, 3]]
    assert second == CreatePod(0, 1, 0, "it has no pod")


def test_too_few_slots_let_the_survivors_wait_for_the_replacement():
    given = rules(slots_per_rank=2)
    slots = np.asarray([[[0, 1], [2, 3], [4, 5]]] * 2, dtype=np.int32)
    view = serving_group()
    view = replace(view, stored=stored(plan_of(view.pods, slots=slots)))
    lost = with_pods(view, gone=[1])
    outcome = decided(lost, given)
    assert outcome.regrouping.short
    assert outcome.plan == view.stored.plan
    assert outcome.actions == (CreatePod(0, 1, 0, "it has no pod"),)

    back = decided(with_pods(lost, pod(1, waiting("n1", 1))), given)
    assert members_of(back.plan) == [(0, "u0"), (2, "u2"), (1, "n1")]
    assert rows(back.plan) == [[0, 1], [4, 5], [2, 3]]
    assert back.plan.generation == 2


def test_survivors_give_up_copies_where_their_slots_are_short():
    slots = np.asarray([[[0, 1, 2], [0, 1, 3], [4, 5, -1]]] * 2, dtype=np.int32)
    view = serving_group()
    view = replace(view, stored=stored(plan_of(view.pods, slots=slots)))
    outcome = decided(with_pods(view, gone=[2]))
    assert members_of(outcome.plan) == [(0, "u0"), (1, "u1")]
    assert sorted(e for row in rows(outcome.plan) for e in row) == [0, 1, 2, 3, 4, 5]
    assert rows(outcome.plan)[0] == [0, 1, 2], "the copies behind go first"


def test_min_serving_ranks_holds_the_survivors_back():
    outcome = decided(with_pods(serving_group(), gone=[1]), rules(min_serving_ranks=3))
    assert outcome.regrouping.short


def test_a_newcomer_joins_once_the_present_plan_is_in_force():
    view = with_pods(serving_group(), gone=[1])
    two = replace(view, stored=stored(plan_of(view.pods, generation=2, epoch=2)))
    newcomer = pod(1, waiting("n1", 1))
    unsettled = decided(with_pods(two, newcomer))
    assert unsettled.plan == two.stored.plan, "the survivors do not run generation 2 yet"

    states = [worker(f"u{m}", m, generation=2, epoch=2) for m in (0, 2)]
    settled = with_pods(two, newcomer, *(pod(s.member, s) for s in states))
    outcome = decided(settled)
    assert members_of(outcome.plan) == [(0, "u0"), (2, "u2"), (1, "n1")]
    assert outcome.plan.generation == 3
    assert {p.uid for p in listeners(settled, outcome.plan)} == {"u0", "u2", "n1"}
    held = np.asarray(outcome.plan.slots())
    assert {int(e) for e in held[0].ravel() if e >= 0} == set(range(6))


def test_a_lost_newcomer_takes_nothing_down_with_it():
    view = serving_group()
    pods = [view.pods[0], view.pods[2], pod(1, waiting("n1", 1))]
    joining = replace(view, stored=stored(plan_of(pods, generation=3, epoch=3)), pods=tuple(pods))
    outcome = decided(with_pods(joining, gone=[1]))
    assert members_of(outcome.plan) == [(0, "u0"), (2, "u2")]
    assert outcome.plan.generation == 4


class TestDraining:
    def leaver(self, running: int, phase: WorkerPhase = WorkerPhase.DRAINING, uid: str = "u1"):
        return pod(1, worker(uid, 1, phase, requests_running=running), deleting=True)

    def test_stays_while_it_has_requests(self):
        outcome = decided(with_pods(serving_group(), self.leaver(running=2)))
        assert outcome.plan.generation == 1
        assert [m.state for m in outcome.members][1] is MemberState.DRAINING
        assert outcome.actions == (CreatePod(0, 1, 0, "replaces d-g0-m1-u1"),)

    def test_leaves_when_idle(self):
        view = with_pods(serving_group(), self.leaver(running=0))
        outcome = decided(view)
        assert members_of(outcome.plan) == [(0, "u0"), (2, "u2")]
        assert "u1" in {p.uid for p in listeners(view, outcome.plan)}, "who leaves must hear it"

    def test_does_not_leave_before_its_worker_knows_that_it_drains(self):
        outcome = decided(with_pods(serving_group(), self.leaver(0, WorkerPhase.SERVING)))
        assert outcome.plan.generation == 1

    def test_its_replacement_takes_over_its_id_in_one_step(self):
        view = with_pods(serving_group(), self.leaver(running=0), pod(1, waiting("n1", 1)))
        outcome = decided(view)
        assert members_of(outcome.plan) == [(0, "u0"), (2, "u2"), (1, "n1")]

    def test_an_idle_leaver_stays_when_the_others_could_not_hold_every_expert(self):
        slots = np.asarray([[[0, 1], [2, 3], [4, 5]]] * 2, dtype=np.int32)
        view = serving_group()
        view = replace(view, stored=stored(plan_of(view.pods, slots=slots)))
        outcome = decided(with_pods(view, self.leaver(running=0)), rules(slots_per_rank=2))
        assert outcome.plan.generation == 1
        assert not outcome.regrouping.short

    def test_a_group_that_goes_as_a_whole_is_not_taken_apart(self):
        leavers = [
            pod(m, worker(f"u{m}", m, WorkerPhase.DRAINING, requests_running=m), deleting=True)
            for m in range(3)
        ]
        outcome = decided(with_pods(serving_group(), *leavers), intent=Intent.REMOVE)
        assert outcome.actions == ()

    def test_a_group_that_goes_is_still_healed_for_its_last_requests(self):
        leavers = [
            pod(m, worker(f"u{m}", m, DISRUPTED, requests_running=1), deleting=True)
            for m in range(2)
        ]
        view = with_pods(serving_group(), *leavers, gone=[2])
        outcome = decided(view, intent=Intent.REMOVE)
        assert members_of(outcome.plan) == [(0, "u0"), (1, "u1")]


class TestBroken:
    def test_the_same_members_meet_again_when_all_noticed(self):
        states = [worker(f"u{m}", m, DISRUPTED) for m in range(3)]
        outcome = decided(with_pods(serving_group(), *(pod(s.member, s) for s in states)))
        assert outcome.plan.generation == 2
        assert members_of(outcome.plan) == [(0, "u0"), (1, "u1"), (2, "u2")]
        assert rows(outcome.plan) == rows(serving_group().stored.plan)

    def test_waits_for_a_member_that_has_not_noticed_yet(self):
        states = [worker(f"u{m}", m, DISRUPTED, suspects=[1]) for m in (0, 2)]
        view = with_pods(serving_group(), *(pod(s.member, s) for s in states))
        assert decided(view).plan.generation == 1
        late = decided(view, ages={("broken", 0, 1): 20.0})
        assert members_of(late.plan) == [(0, "u0"), (2, "u2")], "its loop does not run any more"

    def test_members_that_wait_for_a_slow_one_are_left_to_it(self):
        """Whoever is ready first reports the others as missing: that is no fault."""
        states = [
            worker("u0", 0, WorkerPhase.JOINING, 0, 0, prepared_generation=1, missing_members=[1]),
            worker("u1", 1, WorkerPhase.LOADING, 0, 0),
        ]
        pods = tuple(pod(s.member, s) for s in states)
        view = GroupView(0, pods, stored(plan_of(pods)))
        ages = {("unsettled", 0, 1, 1): 500.0}
        assert decided(view, rules(width=2), ages=ages).plan.generation == 1

    def test_serving_members_that_wait_for_a_newcomer_are_left_alone(self):
        view = serving_group()
        states = [worker(f"u{m}", m, prepared_generation=2, missing_members=[2]) for m in range(2)]
        newcomer = pod(2, worker("n2", 2, WorkerPhase.LOADING, 0, 0))
        pods = (*(pod(s.member, s) for s in states), newcomer)
        growing = replace(view, pods=pods, stored=stored(plan_of(pods, generation=2, epoch=2)))
        outcome = decided(growing, ages={("unsettled", 0, 2, 2): 500.0})
        assert outcome.actions == ()
        assert [m.state.value for m in outcome.members] == ["Serving", "Serving", "Joining"]

    def test_members_that_are_ready_and_do_not_meet_are_given_another_generation(self):
        states = [
            worker(f"u{m}", m, DISRUPTED, prepared_generation=2, missing_members=[1 - m])
            for m in range(2)
        ]
        pods = tuple(pod(s.member, s) for s in states)
        view = GroupView(0, pods, stored(plan_of(pods, generation=2, epoch=2)))
        assert ("prepared", 0, 2) in view.facts()
        assert decided(view, rules(width=2)).plan.generation == 2
        outcome = decided(view, rules(width=2), ages={("prepared", 0, 2): 60.0})
        assert (outcome.plan.generation, outcome.plan.epoch) == (3, 3)

    @pytest.mark.parametrize(("seconds", "members"), [(1.0, 3), (6.0, 2)])
    def test_a_weak_witness_needs_a_longer_silence(self, seconds, members):
        """The group broke by another member's fault; this one may just be slow to answer."""
        states = [worker("u0", 0, DISRUPTED), worker("u1", 1, DISRUPTED)]
        view = with_pods(
            serving_group(),
            replace(silent(serving_group().pods[2]), ready=False),
            *(pod(s.member, s) for s in states),
        )
        outcome = decided(view, ages={("silent", "u2"): seconds})
        assert len(outcome.plan.members) == members

    def test_a_disrupted_group_with_a_newer_plan_under_way_is_left_to_it(self):
        states = [worker(f"u{m}", m, DISRUPTED) for m in range(2)]
        pods = tuple(pod(s.member, s) for s in states)
        view = GroupView(0, pods, stored(plan_of(pods, generation=2, epoch=2)))
        outcome = decided(view, rules(width=2))
        assert outcome.plan.generation == 2
        assert listeners(view, outcome.plan) == list(pods)

    def test_silence_alone_is_no_loss(self):
        outcome = decided(with_pods(serving_group(), silent(serving_group().pods[1])))
        assert outcome.actions == ()
        assert outcome.members[1].state is MemberState.SERVING, "its readiness probe says so"

    def test_a_suspected_silent_member_is_lost(self):
        states = [worker(f"u{m}", m, DISRUPTED, suspects=[1]) for m in (0, 2)]
        view = with_pods(
            serving_group(), silent(serving_group().pods[1]), *(pod(s.member, s) for s in states)
        )
        outcome = decided(view)
        assert members_of(outcome.plan) == [(0, "u0"), (2, "u2")]
        assert outcome.members[1].evidence.startswith("a survivor suspects it")

    def test_a_silent_member_on_a_lost_node_is_lost(self):
        view = with_pods(serving_group(), silent(serving_group().pods[1]))
        outcome = decided(view, rules(unready_nodes={"node1"}))
        assert members_of(outcome.plan) == [(0, "u0"), (2, "u2")]

    def test_when_nobody_answers_nothing_is_concluded(self):
        view = serving_group()
        outcome = decided(with_pods(view, *(silent(p) for p in view.pods)))
        assert outcome.actions == ()


def test_a_pod_of_the_same_name_is_noticed_by_its_uid():
    """F11: deleted and recreated between two looks."""
    old = serving_group()
    again = replace(old.pods[1], uid="other", state=waiting("other", 1))
    view = with_pods(old, again, gone=[1])
    outcome = decided(view)
    assert members_of(outcome.plan) == [(0, "u0"), (2, "u2"), (1, "other")]
    assert outcome.plan.generation == 2


def test_a_process_that_began_anew_in_its_pod_is_another_incarnation():
    view = serving_group()
    again = replace(view.pods[1], state=waiting("other-process", 1))
    outcome = decided(with_pods(view, again))
    assert [m.state for m in outcome.members][1] is MemberState.LOST


def test_a_total_loss_forms_the_group_anew_with_higher_numbers():
    pods = tuple(pod(m, waiting(f"n{m}", m)) for m in range(3))
    view = GroupView(0, pods, stored(plan_of(serving_group().pods, generation=4, epoch=9)))
    outcome = decided(view)
    assert (outcome.plan.generation, outcome.plan.epoch) == (5, 10)
    assert members_of(outcome.plan) == [(0, "n0"), (1, "n1"), (2, "n2")]


def test_a_deleted_placement_is_made_anew_above_what_workers_run():
    pods = tuple(pod(m, worker(f"u{m}", m, generation=7, epoch=12)) for m in range(3))
    outcome = decided(GroupView(0, pods))
    assert (outcome.plan.generation, outcome.plan.epoch) == (8, 13)


def test_a_placement_restored_from_the_past_is_overtaken():
    pods = tuple(pod(m, worker(f"u{m}", m, generation=7, epoch=12)) for m in range(3))
    outcome = decided(GroupView(0, pods, stored(plan_of(pods, generation=3, epoch=4))))
    assert (outcome.plan.generation, outcome.plan.epoch) == (8, 13)


def test_a_new_leader_only_raises_the_fence():
    view = serving_group()
    outcome = decided(view, rules(leader_epoch=5))
    [action] = outcome.actions
    assert action.plan.fence == (5, 1, 1)
    assert action.plan.hash == view.stored.plan.hash
    assert outcome.settled


def test_an_abandoned_wave_leaves_the_placement_before_in_force_for_the_next_generation():
    view = serving_group()
    plan = view.stored.plan
    wave = plans.wave(plan, 1, in_force(plan), one_more_copy(plan), plan.limits)
    assert wave.epoch == 2
    assert wave.previous.epoch == 1
    states = [worker(f"u{m}", m, staged_epoch=1, abandoned_epoch=2) for m in range(3)]
    given_up = with_pods(replace(view, stored=stored(wave)), *(pod(s.member, s) for s in states))
    assert given_up.settled()
    lost = decided(with_pods(given_up, gone=[1]))
    assert rows(lost.plan) == [[0, 1, 2], [4, 5, 3]]
    assert lost.plan.epoch == 3, "the abandoned number is never used again"


def test_a_half_switched_wave_counts_as_switched():
    view = serving_group()
    plan = view.stored.plan
    wave = plans.wave(plan, 1, in_force(plan), one_more_copy(plan), plan.limits)
    states = [worker("u0", 0, DISRUPTED, epoch=2), worker("u2", 2, DISRUPTED, epoch=1)]
    found = plans.placed(wave, states)
    assert found.epoch == 2
    assert found.slots_LRS[0, 0].tolist() == [0, 1, 5]
    assert found.placement.fractions_LRS[0, 0].tolist() == pytest.approx([1, 1, 0.25], abs=1e-4)


def test_fractions_in_force_stay_named_beside_those_of_a_wave():
    view = serving_group()
    plan = view.stored.plan
    first = plans.wave(plan, 1, in_force(plan), one_more_copy(plan), plan.limits)
    shifted = one_more_copy(plan, share=0.9)
    second = plans.wave(first, 1, in_force(first), shifted, plan.limits)
    assert np.array_equal(second.slots(), first.slots()), "an epoch of fractions alone"
    assert second.fractions()[0, 0, 2] == pytest.approx(0.9, abs=1e-4)
    before = plans.placed(second, [worker(f"u{m}", m, epoch=2) for m in range(3)])
    assert before.epoch == 2
    assert before.placement.fractions_LRS[0, 0, 2] == pytest.approx(0.25, abs=1e-4)
    assert first.hash != second.hash


def in_force(plan):
    return plans.Placed(plan.epoch, Placement(plan.slots(), plan.fractions()))


def one_more_copy(plan, share=0.25):
    """Expert 5 of layer 0 also on rank 0, with a share of its tokens."""
    slots, fractions = plan.slots().copy(), plan.fractions()
    slots[0, 0, 2] = 5
    fractions[0, 0, 2], fractions[0, 2, 1] = share, 1 - share
    return Placement(slots, fractions)


def test_copies_share_the_load_known_last_also_among_survivors():
    slots = np.asarray([[[0, 1, 2, -1], [0, 3, -1, -1], [4, 5, -1, -1]]] * 2, dtype=np.int32)
    view = serving_group()
    view = replace(view, stored=stored(plan_of(view.pods, slots=slots)))
    load = np.asarray([[80.0, 20, 20, 20, 20, 20]] * 2)
    plan = decided(with_pods(view, gone=[2]), load_LE=load).plan
    loads = score.rank_loads(plan.slots(), plan.fractions(), load)
    assert loads[0].tolist() == pytest.approx([90.0, 90.0], abs=0.01)
    unknown = decided(with_pods(view, gone=[2])).plan
    assert unknown.fractions()[unknown.slots() == 0].tolist() == [0.5] * 4


def test_members_of_a_plan_have_as_many_domains_each():
    """Also when the levels changed since the plan before, and for a node nobody knows yet."""
    domains = {"node0": ["z1", "n0"], "node2": ["z1", "n2"]}
    newcomer = pod(1, waiting("n1", 1), node="node9")
    view = with_pods(serving_group(), newcomer, gone=[1])
    plan = decided(view, rules(domains=domains)).plan
    assert [m.domains for m in plan.members] == [["z1", "n0"], ["z1", "n2"], ["", ""]]
