"""Workers that die, hang, drain and fail, and an operator that is replaced in the middle of it."""

from __future__ import annotations

from typing import Any

import pytest

from moe_api import names
from moe_api.worker import WorkerPhase
from tests.support.fake_workers import FakeWorker
from tests.support.reconcile_world import World

pytestmark = pytest.mark.apiserver
THREE: dict[str, Any] = {"parallelism": {"expert": 3}}


def members(world: World) -> list[tuple[int, str]]:
    placement = world.placement()
    assert placement is not None
    return [(m["id"], m["uid"]) for m in placement["spec"]["members"]]


def generation(world: World) -> int:
    placement = world.placement()
    assert placement is not None
    return int(placement["spec"]["generation"])


@pytest.mark.parametrize("forgetful", [False, True])
def test_survivors_serve_on_and_the_lost_rank_is_replaced_exactly_once(
    world: World, forgetful: bool
):
    """F11: the others keep their pods, one new UID, one generation without it, one with it."""
    world.forgetful = forgetful
    world.create(**THREE)
    world.converge(world.is_ready)
    before = world.uids()
    lost = world.worker(1).incarnation
    world.delete_pod(1)
    world.one_pass()
    assert generation(world) == 2, "the first pass after the loss gives the survivors their plan"
    assert [m for m, _ in members(world)] == [0, 2]
    assert {world.worker(m).phase for m in (0, 2)} == {WorkerPhase.SERVING}
    world.converge(lambda: world.condition("Degraded") == ("True", "ServingWithSurvivors"))
    assert world.condition("Ready") == ("False", "GroupsNotReady")
    world.converge(world.is_ready)
    after = world.uids()
    assert set(before) - set(after) == {lost}
    assert len(set(after) - set(before)) == 1
    assert (generation(world), len(members(world))) == (3, 3)
    assert world.condition("Degraded") == ("False", "Healthy")
    failure = world.status().groups[0].last_failure
    assert failure is not None
    assert (failure.member, failure.uid, failure.reason) == (1, lost, "PodDeleted")
    if not forgetful:
        assert [reason for reason, _ in world.events].count("RankLost") == 1


def test_a_refused_edit_does_not_keep_survivors_from_serving_on(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.edit({"worker": {"podTemplate": {"spec": {"restartPolicy": "Always"}}}})
    world.converge(lambda: world.condition("Accepted") == ("False", "InvalidSpec"))
    world.delete_pod(1)
    world.one_pass()
    assert generation(world) == 2
    assert len(world.pods()) == 2, "no pod is made of a spec that is refused"
    world.edit({"worker": {"podTemplate": None}})
    world.converge(world.is_ready)


def test_a_second_loss_while_the_first_heals(world: World):
    world.create(parallelism={"expert": 4}, experts={"redundantSlotsPerRank": 2})
    world.converge(world.is_ready)
    before = set(world.uids())
    world.delete_pod(1)
    world.one_pass()
    world.delete_pod(2)
    world.converge(world.is_ready)
    assert len(before & set(world.uids())) == 2, "only the two lost ones are new"
    assert len(world.pods()) == 4


def test_survivors_that_cannot_hold_every_expert_wait_for_the_replacement(world: World):
    world.create(**THREE, experts={"slotsPerRank": 2, "spareSlotsPerRank": 0})
    world.converge(world.is_ready)
    assert world.status().survives_rank_loss is False
    survivors = {world.worker(m).incarnation for m in (0, 2)}
    world.delete_pod(1)
    world.one_pass()
    assert generation(world) == 1
    assert world.condition("Degraded") == ("True", "InsufficientSlots")
    assert world.condition("ExpertsCovered") == ("False", "Uncovered")
    assert world.status().groups[0].phase == "Disrupted"
    world.converge(world.is_ready)
    assert generation(world) == 2
    assert survivors <= set(world.uids())
    reasons = [reason for reason, _ in world.events]
    assert "ExpertUncovered" in reasons
    assert "CoverageRestored" in reasons


def test_a_hanging_worker_is_taken_out_and_its_pod_killed(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    hung = world.worker(1).incarnation
    world.fleet.hang(hung)
    world.one_pass()
    assert [m for m, _ in members(world)] == [0, 2]
    assert hung not in world.uids()
    world.converge(world.is_ready)
    failure = world.status().groups[0].last_failure
    assert failure is not None
    assert (failure.uid, failure.reason) == (hung, "Unreachable")


def test_a_worker_that_is_slow_to_answer_once_is_not_lost(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    slow = world.worker(1)
    slow.hung = True
    world.one_pass()
    slow.hung = False
    world.one_pass()
    world.converge(world.is_ready)
    assert generation(world) == 1


def test_a_failed_pod_leaves_evidence_and_a_count(world: World):
    world.create(**THREE)
    world.converge(world.is_ready)
    world.fail_pod(1)
    world.converge(world.is_ready)
    group = world.status().groups[0]
    assert group.last_failure is not None
    assert (group.last_failure.member, group.last_failure.exit_code) == (1, 137)
    assert [(r.member, r.count) for r in group.restarts] == [(1, 1)]
    assert len(world.pods()) == 3, "the failed pod is not kept by default"


def test_restarts_pause_and_end(world: World):
    """The count outlives the operator: it is on the pods."""
    world.create(**THREE, failurePolicy={"maxRestarts": 2})
    world.converge(world.is_ready)
    world.fail_pod(1)
    world.converge(world.is_ready)
    world.restart_operator()
    world.fail_pod(1)
    world.one_pass()
    world.one_pass()
    assert world.condition("Degraded") == ("True", "RestartBackoff")
    world.converge(world.is_ready)
    world.fail_pod(1)
    world.converge(lambda: world.condition("Degraded")[1] == "MaxRestartsReached")
    assert len(world.pods()) == 3, "the last failed pod stays, with the count on it"
    assert [r.count for r in world.status().groups[0].restarts] == [2]


def test_a_worker_that_cannot_load_is_replaced_and_the_reason_told(world: World):
    def broken(worker: FakeWorker) -> None:
        if worker.member == 1:
            worker.phase = WorkerPhase.FAILED
            worker.last_error = "model.safetensors ends early"

    world.shape_workers = broken
    world.create(**THREE, failurePolicy={"maxRestarts": 0})
    world.converge(lambda: world.condition("Degraded")[1] == "MaxRestartsReached")
    [ready] = [c for c in world.status().conditions if c.type == "Ready"]
    assert ready.status == "False"
    assert "model.safetensors ends early" in ready.message


def test_a_gracefully_deleted_pod_drains_inside_the_generation_first(world: World):
    world.nodes = {1: world.make_node()}
    world.create(**THREE)
    world.converge(world.is_ready)
    leaver = world.worker(1)
    leaver.running = 1
    world.delete_pod(1, grace_seconds=70)
    for _ in range(3):
        world.one_pass()
    assert leaver.phase is WorkerPhase.DRAINING
    assert (leaver.generation, generation(world)) == (1, 1), "it has a request to finish"
    assert world.status().ranks.leaving == 1
    assert len(world.pods()) == 4, "its replacement starts meanwhile"
    leaver.running = 0
    world.converge(lambda: leaver.incarnation not in world.uids())
    world.converge(world.is_ready)
    assert all(w.suspects == [] for w in world.fleet.workers.values()), "nobody was disrupted"
    reasons = [reason for reason, _ in world.events]
    assert "DrainStarted" in reasons
    assert "RankLost" not in reasons


def test_the_disruption_budget_follows_the_serving_ranks(world: World):
    world.create(**THREE)
    world.one_pass()
    assert world.budget() == 0
    world.converge(world.is_ready)
    world.one_pass()
    assert world.budget() == 2
    world.delete_pod(1)
    world.one_pass()
    world.one_pass()
    assert world.budget() == 2, "until three serve again no other may go"
    world.converge(world.is_ready)
    world.edit({"disruption": {"pdb": "None"}})
    world.one_pass()
    path = f"/apis/policy/v1/namespaces/{world.namespace}/poddisruptionbudgets/d-g0"
    assert world.find(path) is None


class TestOperatorReplaced:
    def test_between_storing_and_announcing_a_plan(self, world: World, monkeypatch: Any):
        """F15: stored first, so the next operator announces what the last one decided."""
        world.create(**THREE)

        def dies(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr("moe_operator.act.announce", dies)
            with pytest.raises(KeyboardInterrupt):
                world.converge(world.is_ready)
        assert generation(world) == 1
        assert all(w.plan is None for w in world.fleet.workers.values())
        world.restart_operator()
        world.converge(world.is_ready)
        assert generation(world) == 1
        assert {w.plan.fence for w in world.fleet.workers.values() if w.plan} == {(2, 1, 1)}

    def test_a_plan_that_only_some_heard(self, world: World, monkeypatch: Any):
        world.create(**THREE)
        world.converge(lambda: len(world.fleet.workers) == 3)
        deaf = world.worker(2)
        deaf.hung = True
        world.converge(lambda: world.worker(2).hung)
        deaf.hung = False
        world.converge(lambda: world.placement() is not None)
        world.restart_operator()
        world.converge(world.is_ready)
        assert generation(world) == 1

    def test_a_new_leader_raises_the_fence_and_changes_nothing_else(self, world: World):
        world.create(**THREE)
        world.converge(world.is_ready)
        before = world.uids(), world.placement()["spec"]["hash"]  # type: ignore[index]
        world.restart_operator()
        world.one_pass()
        assert {w.plan.fence for w in world.fleet.workers.values() if w.plan} == {(2, 1, 1)}
        world.one_pass()
        assert (world.uids(), world.placement()["spec"]["hash"]) == before  # type: ignore[index]
        assert world.is_ready()

    def test_a_stale_leader_cannot_overwrite_the_plan(self, world: World):
        world.create(**THREE)
        world.converge(world.is_ready)
        stale = world.context
        world.restart_operator()
        world.one_pass()
        placement = world.placement()
        assert placement is not None
        old = {**placement["spec"], "leaderEpoch": 1, "epoch": 9}
        with pytest.raises(Exception, match="another operator leads"):
            stale.cluster.apply(
                {"apiVersion": placement["apiVersion"], "kind": placement["kind"],
                 "metadata": {"name": "d-g0", "namespace": world.namespace}, "spec": old}
            )  # fmt: skip

    def test_a_deleted_placement_is_made_again_while_all_serve_on(self, world: World):
        world.create(**THREE)
        world.converge(world.is_ready)
        before = world.uids()
        path = f"/apis/{names.API_GROUP_VERSION}/namespaces/{world.namespace}/expertplacements/d-g0"
        world.api.request("DELETE", path)
        world.restart_operator()
        world.converge(lambda: world.placement() is not None and world.is_ready())
        assert generation(world) == 2
        assert world.uids() == before
