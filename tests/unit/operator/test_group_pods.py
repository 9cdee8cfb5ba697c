"""Which pods a group should have: fill, replace with pauses, prune, roll, refuse, remove."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_api.worker import WorkerPhase
from moe_operator.actions import CreatePod, DeleteGroup, DeletePod, Drain
from moe_operator.replacement import KILL_GRACE_SECONDS, Pausing, pause_seconds
from moe_operator.rules import GroupView, Intent
from tests.support.group_views import (
    OLD_HASH,
    decided,
    ended,
    pod,
    rules,
    serving_group,
    silent,
    stored,
    waiting,
    with_pods,
    worker,
)


def created(outcome):
    return [(a.member, a.restarts) for a in outcome.actions if isinstance(a, CreatePod)]


def deleted(outcome):
    return [(a.pod.uid, a.grace_seconds) for a in outcome.actions if isinstance(a, DeletePod)]


def test_an_empty_group_gets_a_pod_for_each_member():
    outcome = decided(GroupView(0))
    assert created(outcome) == [(0, 0), (1, 0), (2, 0)]
    assert deleted(outcome) == []


def test_a_restart_half_way_creates_only_what_is_missing():
    assert created(decided(GroupView(0, (pod(1),)))) == [(0, 0), (2, 0)]


@pytest.mark.parametrize(
    ("restarts", "seconds"), [(0, 0), (1, 0), (2, 10), (3, 20), (4, 40), (7, 300), (99, 300)]
)
def test_pauses_double_up_to_five_minutes(restarts, seconds):
    assert pause_seconds(restarts) == seconds


class TestFailures:
    def view(self, *pods):
        return GroupView(0, (pod(0), pod(1), *pods))

    def test_the_first_failure_is_replaced_at_once_and_stays_until_it_is(self):
        outcome = decided(self.view(ended(2, "f")))
        assert created(outcome) == [(2, 1)]
        assert deleted(outcome) == []

    def test_the_failed_pod_goes_when_its_successor_is_there(self):
        view = self.view(ended(2, "f"), pod(2, uid="n", created="2026-01-01T00:01:00Z"))
        assert created(decided(view)) == []
        assert deleted(decided(view)) == [("f", None)]

    def test_failed_pods_are_kept_for_inspection_newest_first(self):
        pods = [ended(2, f"f{i}", created=f"2026-01-01T00:0{i}:00Z") for i in range(3)]
        view = self.view(*pods, pod(2, uid="n", created="2026-01-01T00:09:00Z"))
        assert deleted(decided(view, rules(retain_failed_pods=2))) == [("f0", None)]

    def test_the_pause_before_a_later_replacement(self):
        view = self.view(ended(2, "f", restarts=2))
        waiting_still = decided(view, ages={("ended", "f"): 5.0})
        assert waiting_still.actions == ()
        assert waiting_still.pausing == (Pausing(2, 2, 15.0),)
        assert created(decided(view, ages={("ended", "f"): 20.0})) == [(2, 3)]

    def test_no_replacement_beyond_the_limit(self):
        outcome = decided(self.view(ended(2, "f", restarts=5)), ages={("ended", "f"): 1e6})
        assert outcome.actions == ()
        assert outcome.pausing == (Pausing(2, 5, None),)

    def test_having_served_for_long_begins_the_count_anew(self):
        failed = ended(2, "f", restarts=5)
        assert failed.end is not None
        long = replace(failed, end=replace(failed.end, ran_seconds=601.0))
        assert created(decided(self.view(long))) == [(2, 1)]

    def test_a_deleted_pod_is_replaced_without_blame(self):
        assert created(decided(self.view(pod(2, uid="g", restarts=2, deleting=True)))) == [(2, 2)]

    def test_a_worker_that_says_it_failed_is_replaced_then_killed(self):
        state = worker("f", 2, WorkerPhase.FAILED, last_error="weights are cut short")
        outcome = decided(self.view(pod(2, state)))
        assert created(outcome) == [(2, 1)]
        assert deleted(outcome) == [("f", KILL_GRACE_SECONDS)]
        kinds = [type(action) for action in outcome.actions]
        assert kinds.index(CreatePod) < kinds.index(DeletePod), "the successor carries the count"

    def test_a_crash_between_the_two_is_put_right(self):
        state = worker("f", 2, WorkerPhase.FAILED)
        view = self.view(pod(2, state), pod(2, uid="n", created="2026-01-01T00:01:00Z"))
        assert created(decided(view)) == []
        assert deleted(decided(view)) == [("f", KILL_GRACE_SECONDS)]


def test_a_hanging_member_is_replaced_and_killed():
    states = [worker(f"u{m}", m, WorkerPhase.DISRUPTED, suspects=[1]) for m in (0, 2)]
    hung = silent(serving_group().pods[1])
    outcome = decided(with_pods(serving_group(), hung, *(pod(s.member, s) for s in states)))
    assert created(outcome) == [(1, 1)]
    assert deleted(outcome) == [("u1", KILL_GRACE_SECONDS)]


def test_a_member_on_a_lost_node_is_replaced_without_blame():
    view = with_pods(serving_group(), silent(serving_group().pods[1]))
    assert created(decided(view, rules(unready_nodes={"node1"}))) == [(1, 0)]


def test_the_killed_one_does_not_come_back_in_place_of_its_successor():
    view = with_pods(serving_group(), gone=[1])
    plan = decided(view).plan
    hung = silent(pod(1, waiting("u1", 1)))
    successor = pod(1, uid="n1", created="2026-01-01T00:01:00Z")
    later = with_pods(replace(view, stored=stored(plan)), hung, successor)
    assert deleted(decided(later)) == [("u1", None)]


def test_two_live_pods_of_a_member_leave_the_one_in_the_plan():
    twin = pod(1, waiting("twin", 1), created="2026-01-01T00:01:00Z")
    assert deleted(decided(with_pods(serving_group(), twin))) == [("twin", None)]


class TestRollOut:
    old = tuple(pod(m, worker(f"u{m}", m), template_hash=OLD_HASH) for m in range(3))

    def test_all_old_pods_go_first(self):
        outcome = decided(GroupView(0, self.old), intent=Intent.ROLL)
        assert deleted(outcome) == [("u0", None), ("u1", None), ("u2", None)]
        assert created(outcome) == []

    def test_nothing_is_made_while_one_of_them_is_there(self):
        going = replace(self.old[1], deleting=True)
        outcome = decided(GroupView(0, (going,)), intent=Intent.ROLL)
        assert outcome.actions == ()

    def test_then_the_group_is_made_anew(self):
        outcome = decided(GroupView(0, (), serving_group().stored))
        assert created(outcome) == [(0, 0), (1, 0), (2, 0)]
        assert outcome.plan.generation == 1, "a plan follows when the new pods wait"

    def test_a_group_that_waits_its_turn_is_left_alone(self):
        assert decided(GroupView(0, self.old), intent=Intent.WAIT).actions == ()


def test_a09_a_refused_model_leaves_no_pod_and_makes_none():
    """A09: pods that found out are removed, pods of an older template serve on."""
    new = pod(0, worker("n0", 0, WorkerPhase.FAILED, error_reason="ModelHasNoExperts"))
    old = pod(1, worker("o1", 1), template_hash=OLD_HASH)
    outcome = decided(GroupView(0, (new, old)), intent=Intent.REFUSE)
    assert deleted(outcome) == [("n0", None)]
    assert created(outcome) == []


class TestScaleDown:
    def test_serving_workers_are_asked_to_drain(self):
        view = serving_group()
        outcome = decided(view, intent=Intent.REMOVE, ages={("shrinking", 0): 0.0})
        assert outcome.actions == (Drain(view.pods),)

    def test_pods_go_when_the_last_request_has_ended(self):
        states = [worker(f"u{m}", m, WorkerPhase.DRAINING, requests_running=m) for m in range(2)]
        busy = GroupView(0, tuple(pod(s.member, s) for s in states))
        assert decided(busy, intent=Intent.REMOVE).actions == ()
        states = [worker(f"u{m}", m, WorkerPhase.DRAINING) for m in range(2)]
        idle = GroupView(0, tuple(pod(s.member, s) for s in states))
        assert deleted(decided(idle, intent=Intent.REMOVE)) == [("u0", None), ("u1", None)]

    def test_pods_go_at_the_deadline(self):
        state = worker("u0", 0, WorkerPhase.DRAINING, requests_running=1)
        view = GroupView(0, (pod(0, state),))
        outcome = decided(view, intent=Intent.REMOVE, ages={("shrinking", 0): 60.0})
        assert deleted(outcome) == [("u0", None)]

    def test_what_never_served_goes_at_once(self):
        assert deleted(decided(GroupView(0, (pod(0),)), intent=Intent.REMOVE)) == [("u0", None)]

    def test_the_plan_goes_with_the_last_pod(self):
        view = GroupView(0, (), serving_group().stored)
        assert decided(view, intent=Intent.REMOVE).actions == (DeleteGroup(0),)
