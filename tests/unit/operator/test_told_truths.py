"""Conditions, group counts, losses and events: from outcomes by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_api.conditions import ConditionType, Reason, make_condition
from moe_api.status import Decision, GroupStatus, MoEDeploymentStatus, RankCounts
from moe_api.worker import WorkerPhase
from moe_operator.acceptance import MODEL_REASONS, VALID, judge_model
from moe_operator.conditions import scaling_active, spec_honoured, truths
from moe_operator.desired import Unreadable, desired
from moe_operator.evidence import Loss, losses
from moe_operator.group_status import group_status
from moe_operator.news import news
from moe_operator.observe import NodeView, Observation
from moe_operator.rebalance import Rebalance
from moe_operator.report import Report
from moe_operator.rules import GroupView, Intent
from moe_operator.settings import WorkerDefaults
from moe_operator.status import unreadable_status
from tests.support.group_views import (
    SHAPE,
    decided,
    ended,
    pod,
    rules,
    serving_group,
    silent,
    waiting,
    with_pods,
    worker,
)


def wish(**spec):
    manifest = {
        "metadata": {"name": "d", "namespace": "ns", "uid": "u", "generation": 3,
                     "resourceVersion": "1"},
        "spec": {"model": {"uri": "file:///m"}, "parallelism": {"expert": 3}, **spec},
    }  # fmt: skip
    return desired(manifest, WorkerDefaults(image="i"))


def report(*outcomes, nodes=(), problems=(), ages=None, **spec):
    given = wish(**spec)
    views = {o.view.index: o.view for o in outcomes}
    model = next((p.state.model for v in views.values() for p in v.pods if p.state), None)
    return Report(
        given, given.acceptance, Observation(views, {n.name: n for n in nodes}), model, rules(),
        ages or {}, [Rebalance(o) for o in outcomes], problems,
    )  # fmt: skip


def told(given, kind):
    truth = truths(given)[ConditionType(kind)]
    return truth.status, truth.reason.value


LOST = decided(with_pods(serving_group(), gone=[1]))


class TestReady:
    def test_all_serve(self):
        assert told(report(decided(serving_group())), "Ready") == ("True", "AllGroupsServing")

    def test_scaled_to_zero(self):
        assert told(report(replicas=0), "Ready") == ("True", "ScaledToZero")

    def test_survivors_are_not_ready(self):
        assert told(report(LOST), "Ready") == ("False", "GroupsNotReady")

    def test_nobody_knows_the_model_yet(self):
        outcome = decided(GroupView(0, (pod(0),)))
        assert told(report(outcome), "Ready") == ("False", "WaitingForModel")

    def test_the_cluster_has_no_room(self):
        stuck = pod(0, waiting="Unschedulable: 0/3 nodes are available")
        given = report(decided(GroupView(0, (stuck,))))
        assert told(given, "Ready") == ("False", "NoCapacity")
        assert "0/3 nodes" in truths(given)[ConditionType.READY].message

    def test_a_quota_is_no_capacity_another_refusal_is_not(self):
        outcome = decided(GroupView(0))
        assert told(report(outcome, problems=["exceeded quota: q"]), "Ready")[1] == "NoCapacity"
        assert told(report(outcome, problems=["admission"]), "Ready")[1] == "GroupsNotReady"

    def test_the_failed_pod_is_named_before_those_that_wait(self):
        view = GroupView(0, (pod(0, waiting_state("u0", 0)), ended(2, "f")))
        message = truths(report(decided(view)))[ConditionType.READY].message
        assert "pod d-g0-m2-f: ended: Error, exit code 1: boom" in message

    def test_paused(self):
        assert told(report(LOST, paused=True), "Ready") == ("False", "Paused")


def waiting_state(uid, member):
    return waiting(uid, member)


class TestDegraded:
    def test_healthy(self):
        assert told(report(decided(serving_group())), "Degraded") == ("False", "Healthy")

    def test_the_moment_of_a_loss(self):
        assert told(report(LOST), "Degraded") == ("True", "RankLost")

    def test_a_lost_node_is_named(self):
        view = with_pods(serving_group(), silent(serving_group().pods[1]))
        lost = rules(unready_nodes={"node1"})
        given = replace(report(decided(view, lost)), rules=lost)
        assert told(given, "Degraded") == ("True", "NodeUnhealthy")

    def test_too_few_slots(self):
        outcome = decided(with_pods(serving_group(), gone=[1]), rules(min_serving_ranks=3))
        assert told(report(outcome), "Degraded") == ("True", "InsufficientSlots")

    @pytest.mark.parametrize(
        ("restarts", "reason"), [(2, "RestartBackoff"), (5, "MaxRestartsReached")]
    )
    def test_restarts(self, restarts, reason):
        view = GroupView(0, (pod(0), pod(1), ended(2, "f", restarts=restarts)))
        assert told(report(decided(view)), "Degraded") == ("True", reason)


class TestOthers:
    def test_forming_is_scaling_up_and_has_a_deadline(self):
        outcome = decided(GroupView(0, (pod(0), pod(1), pod(2))))
        assert told(report(outcome), "Progressing") == ("True", "ScalingUp")
        late = report(outcome, ages={("short", 0): 601.0})
        assert told(late, "Progressing") == ("False", "DeadlineExceeded")

    def test_a_group_that_goes_is_scaling_down(self):
        outcome = decided(serving_group(), intent=Intent.REMOVE)
        assert told(report(outcome, replicas=0), "Progressing") == ("True", "ScalingDown")

    def test_coverage_counts_live_copies(self):
        assert told(report(decided(serving_group())), "ExpertsCovered") == ("True", "SingleCopy")
        assert told(report(LOST), "ExpertsCovered") == ("False", "Uncovered")
        assert told(report(decided(GroupView(0))), "ExpertsCovered") == ("False", "Uncovered")

    def test_a_level_without_labels_is_told_when_the_user_wrote_it(self):
        node = NodeView("n", {"kubernetes.io/hostname": "n"}, ready=True, cordoned=False)
        level = {"levels": [{"name": "rack", "nodeLabel": "example.com/rack"}]}
        given = report(nodes=[node], topology=level)
        assert told(given, "TopologySatisfied") == ("False", "LevelLabelMissing")
        assert told(report(nodes=[node]), "TopologySatisfied") == ("True", "Packed")

    def test_packing_that_nobody_does_is_not_called_satisfied(self):
        pack = {"pack": {"level": "hostname", "mode": "Required"}}
        assert told(report(topology=pack), "TopologySatisfied")[0] == "Unknown"

    def test_who_scales(self):
        assert scaling_active("None").reason == Reason.DISABLED
        assert scaling_active("External").status == "True"
        assert scaling_active("Prometheus").reason == Reason.NOT_IMPLEMENTED

    def test_ignored_fields_are_named(self):
        assert "spec.router.capacityFactor" in spec_honoured(["router.capacityFactor"]).message


class TestUnreadable:
    def test_what_was_under_way_is_not_any_more(self):
        rolling = make_condition(
            ConditionType.PROGRESSING, "True", Reason.ROLLING_OUT, "", generation=2, now="t"
        )
        manifest = {
            "metadata": {"name": "d", "namespace": "ns", "uid": "u", "generation": 3,
                         "resourceVersion": "1"},
            "spec": {"model": {"uri": "file:///m"}, "parallelism": {"expert": 0}},
            "status": MoEDeploymentStatus(conditions=[rolling]).to_wire(),
        }  # fmt: skip
        found = desired(manifest, WorkerDefaults(image="i"))
        assert isinstance(found, Unreadable)
        conditions = unreadable_status(found, "now").conditions
        assert {c.type: (c.status, c.reason) for c in conditions} == {
            "Ready": ("False", "InvalidSpec"),
            "Accepted": ("False", "InvalidSpec"),
            "Progressing": ("False", "Complete"),
        }
        assert all("expert" in c.message for c in conditions if c.type != "Progressing")


class TestCounts:
    def counts(self, outcome):
        return group_status(report(outcome), outcome, None)

    def test_serving(self):
        assert self.counts(decided(serving_group())).ranks.summary == "3/3"
        assert self.counts(decided(serving_group())).phase == "Serving"

    def test_a_lost_rank_is_lost_until_its_pod_is_there(self):
        ranks = self.counts(LOST).ranks
        assert (ranks.serving, ranks.lost, ranks.joining) == (2, 1, 0)
        back = decided(with_pods(serving_group(), pod(1, uid="n1"), gone=[1]))
        ranks = self.counts(back).ranks
        assert (ranks.serving, ranks.lost, ranks.joining) == (2, 0, 1)

    def test_phases(self):
        assert self.counts(decided(GroupView(0))).phase == "Starting"
        assert self.counts(LOST).phase == "Degraded"
        assert self.counts(decided(serving_group(), intent=Intent.REMOVE)).phase == "Draining"
        broken = [pod(m, worker(f"u{m}", m, WorkerPhase.DISRUPTED)) for m in range(3)]
        assert self.counts(decided(with_pods(serving_group(), *broken))).phase == "Disrupted"
        loading = [pod(m, worker(f"u{m}", m, WorkerPhase.LOADING, 0, 0)) for m in range(3)]
        assert self.counts(decided(with_pods(serving_group(), *loading))).phase == "Joining"


class TestLosses:
    def test_a_lost_member_is_told_once(self):
        [loss] = losses(LOST, known=())
        assert (loss.member, loss.uid, loss.why) == (1, "u1", "pod d-g0-m1-u1 is gone")
        assert losses(LOST, known={"u1"}) == []

    def test_what_we_removed_ourselves_is_no_loss(self):
        assert losses(decided(with_pods(serving_group(), gone=[1]), intent=Intent.ROLL), ()) == []
        gone = decided(replace(serving_group(), pods=()))
        assert losses(gone, ()) == []

    def test_a_failed_pod_is_one_also_before_the_group_forms(self):
        [loss] = losses(decided(GroupView(0, (pod(0), ended(1, "f")))), ())
        assert (loss.member, loss.uid) == (1, "f")


class TestModelVerdict:
    spec = wish().spec

    def test_a_worker_tells_why_it_cannot_serve(self):
        state = worker("u", 0, WorkerPhase.FAILED, error_reason="ModelUnreadable",
                       last_error="/m/config.json is missing", model=None)  # fmt: skip
        verdict = judge_model(self.spec, [pod(0, state)], None, 3, [])
        assert verdict.reason == Reason.MODEL_UNREADABLE
        assert "/m/config.json is missing" in verdict.message

    def test_d10_a_cache_that_does_not_fit_the_model_is_told_with_its_layer(self):
        state = worker("u", 0, WorkerPhase.FAILED, error_reason="KvCacheUnusable",
                       last_error="scales.json: layer 1 is missing", model=None)  # fmt: skip
        verdict = judge_model(self.spec, [pod(0, state)], None, 3, [])
        assert verdict.reason == Reason.KV_CACHE_UNUSABLE
        assert not verdict.accepted
        assert "spec.kvCache" in verdict.message
        assert "layer 1 is missing" in verdict.message

    def test_another_failure_is_no_verdict(self):
        state = worker("u", 0, WorkerPhase.FAILED, error_reason="KvDoesNotFit", model=None)
        assert judge_model(self.spec, [pod(0, state)], None, 3, []) == VALID

    @pytest.mark.parametrize(("slots", "accepted"), [(1, False), (2, True)])
    def test_capacity_is_all_that_is_checked(self, slots, accepted):
        spec = wish(experts={"slotsPerRank": slots}).spec
        assert judge_model(spec, [], SHAPE, 3, []).accepted is accepted

    def test_a01_the_slots_that_counts_come_to_are_told(self):
        """60 experts on ranks of three nodes, 8 + 8 + 4: nothing has to divide, slots are alike."""
        shape = SHAPE.model_copy(update={"experts": 60})
        ranks = {"parallelism": {"expert": 20}}
        for experts in ({"slotsPerRank": 4}, {"redundantSlotsPerRank": 1}, {}):
            verdict = judge_model(wish(experts=experts, **ranks).spec, [], shape, 3, [])
            assert verdict.accepted
            assert "4 slots on each of 20 ranks, 60 for one" in verdict.message
            assert "and 20 for more copies" in verdict.message
        few = judge_model(wish(experts={"slotsPerRank": 2}, **ranks).spec, [], shape, 3, [])
        assert few.reason == Reason.INSUFFICIENT_SLOTS
        assert "2 on 20 ranks gives 40 slots for 60 experts: set it to 3 or more" in few.message

    def test_copies_that_nobody_has_room_for_are_refused_with_the_way_out(self):
        spec = wish(experts={"slotsPerRank": 3, "minReplicas": 2}).spec
        refused = judge_model(spec, [], SHAPE, 3, [])
        assert refused.reason == Reason.INSUFFICIENT_SLOTS
        assert refused.message == (
            "spec.experts.minReplicas 2 needs 12 slots for 6 experts, 3 on each of 3 ranks give "
            "9: lower it to 1, or set experts.slotsPerRank to 4"
        )
        roomy = wish(experts={"slotsPerRank": 4, "minReplicas": 2}).spec
        assert judge_model(roomy, [], SHAPE, 3, []).accepted

    def test_what_was_told_of_the_model_stays_while_no_worker_can_tell(self):
        told = judge_model(self.spec, [], SHAPE, 3, [])
        condition = make_condition(
            ConditionType.ACCEPTED, "True", told.reason, told.message, generation=3, now="t"
        )
        assert judge_model(self.spec, [], None, 3, [condition]) == told
        assert judge_model(self.spec, [], None, 4, [condition]) == VALID

    @pytest.mark.parametrize(("generation", "kept"), [(3, True), (4, False)])
    def test_the_verdict_is_remembered_until_the_spec_changes(self, generation, kept):
        condition = make_condition(
            ConditionType.ACCEPTED, "False", MODEL_REASONS[0], "m", generation=3, now="t"
        )
        verdict = judge_model(self.spec, [], None, generation, [condition])
        assert verdict.accepted is not kept


class TestNews:
    def status(self, serving=3, generation=1, decisions=()):
        ranks = RankCounts(desired=3, serving=serving)
        group = GroupStatus(name="g", generation=generation, ranks=ranks)
        return MoEDeploymentStatus(groups=[group], decisions=list(decisions))

    def test_a_rank_that_joins(self):
        [item] = news(self.status(serving=2), self.status(), [])
        assert item.reason == "RankJoined"

    def test_a_loss(self):
        loss = Loss(0, 1, "p", "u", None, "pod p is gone")
        [item] = news(self.status(), self.status(serving=2), [loss])
        assert (item.severity, item.reason) == ("Warning", "RankLost")

    def test_a_rebalance_is_told_when_its_weights_have_moved(self):
        begun = Decision(time="t", group="g", verdict="Applied", reason="AboveTarget")
        assert news(self.status(), self.status(decisions=[begun]), []) == []
        moved = begun.model_copy(update={"bytes": 5})
        [item] = news(self.status(decisions=[begun]), self.status(decisions=[moved]), [])
        assert item.reason == "RebalanceApplied"
        assert news(self.status(decisions=[moved]), self.status(decisions=[moved]), []) == []

    def test_nothing_to_do_is_no_news(self):
        quiet = Decision(time="t", group="g", verdict="Skipped", reason="WithinTarget")
        assert news(self.status(), self.status(decisions=[quiet]), []) == []
        said = quiet.model_copy(update={"reason": "GainBelowMinimum"})
        [item] = news(self.status(), self.status(decisions=[said]), [])
        assert item.reason == "RebalanceSkipped"
