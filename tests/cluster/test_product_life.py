"""The life of one deployment: applied, chatted with, rebalanced, scaled, rolled, evicted, deleted.

Three ranks whose slots survive the loss of any one. The tests build on each other in this order,
because a group takes its time to start on two processors.
"""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from devcluster.api import ApiError
from devcluster.build import CHECKOUT
from devcluster.cluster import Cluster
from devcluster.images import SAME_HOST_IMAGE
from devcluster.waiting import wait_until
from moe_api import names
from moe_placement import score
from tests.support.product import OPERATOR_NAMESPACE, Deployment, traffic

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = "def main(argv):"
CODE = (CHECKOUT / "examples/tiny-moe/heldout/code.txt").read_text()[:400]


@pytest.fixture(scope="module")
def moe(installed: Cluster, module_namespace: str) -> Deployment:
    made = Deployment(installed, module_namespace, "life")
    made.apply(parallelism={"expert": 3}, experts={"slotsPerRank": 5, "spareSlotsPerRank": 1})
    made.wait_ready()
    return made


@pytest.fixture(scope="module")
def answer(moe: Deployment) -> str:
    """The greedy answer that must stay the same whatever happens to the group."""
    return moe.answer(PROMPT)


def test_apply_becomes_ready_and_chats(moe: Deployment, answer: str) -> None:
    status = moe.status
    assert (status["ready"], status["ranks"]["summary"]) == ("1/1", "3/3")
    assert status["survivesRankLoss"] is True
    assert moe.condition("Accepted") == ("True", "Valid")
    assert moe.condition("SpecHonoured") == ("True", "Complete")
    assert moe.condition("ExpertsCovered")[0] == "True"
    assert moe.condition("ScalingActive")[1] == "Disabled"
    for address in moe.addresses():
        assert moe.answer(PROMPT, address=address) == answer, "every rank answers alike"
    body = {"model": "tiny-moe", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
    url = f"{moe.addresses()[0]}/v1/chat/completions"
    reply = httpx.post(url, json=body, timeout=60, trust_env=False)
    assert reply.json()["choices"][0]["message"]["role"] == "assistant"
    columns = moe.kubectl("get", "moed,xp").splitlines()
    assert "READY" in columns[0]
    assert "1/1" in columns[1]


def test_nothing_of_ours_is_on_the_users_object(moe: Deployment) -> None:
    metadata = moe.object["metadata"]
    ours = set(metadata.get("annotations", {})) - {
        "kubectl.kubernetes.io/last-applied-configuration"
    }
    assert not ours
    assert "finalizers" not in metadata
    assert "ownerReferences" not in metadata
    for pod in moe.pods():
        assert pod["metadata"]["ownerReferences"][0]["uid"] == metadata["uid"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert "finalizers" not in pod["metadata"]


def test_f03_an_idle_deployment_is_not_written(moe: Deployment) -> None:
    """Passes that find nothing to do write nothing, once what the start began has been told."""

    def unwritten_over_five_passes() -> bool:
        before = moe.object["metadata"]["resourceVersion"]
        for number in range(5):
            poke(moe, f"{before}-{number}")
        return moe.object["metadata"]["resourceVersion"] == before

    moe.wait(lambda: moe.condition("Progressing")[0] == "False", "a settled deployment")
    moe.wait(unwritten_over_five_passes, "passes without a write", 60)


def poke(moe: Deployment, value: str) -> None:
    """Have the operator look: an event of an owned object asks for a pass."""
    service = names.service_name(moe.name)
    moe.kubectl("annotate", "service", service, f"test/poke={value}", "--overwrite")


def test_replayed_prompts_are_as_balanced_as_the_plan_predicted(
    moe: Deployment, answer: str
) -> None:
    """One recorded set of prompts before and after: what ranks serve of it is within 2 % of what
    the plan predicts for it."""
    prompts = pieces("english.txt", 24)
    # Another window begins the operator's memory anew: it holds this set and nothing else.
    moe.patch({"rebalancing": {"windowSeconds": 3600, "minGainPercent": 1}})
    moe.wait_ready()
    first = moe.counters()
    moe.replay(prompts)
    recorded = moe.counters()
    load_LE = recorded.routed_LE - first.routed_LE
    before = score.imbalance(recorded.served_LR - first.served_LR)
    assert before is not None
    epoch = moe.plan().epoch
    moe.patch({"rebalancing": {"mode": "Auto", "cooldownSeconds": 3600}})
    moe.wait(lambda: walked(moe, epoch), "the plan for these prompts to be in force")
    plan = moe.plan()
    predicted = score.imbalance(score.rank_loads(plan.slots(), plan.fractions(), load_LE))
    assert predicted is not None
    assert predicted.worst < before.worst - 0.1
    told = moe.placement()["status"]["imbalancePredicted"]
    assert told == pytest.approx(predicted.worst, rel=0.02)

    start = moe.counters()
    moe.replay(prompts)
    end = moe.counters()
    assert moe.plan().epoch == plan.epoch
    assert np.array_equal(end.routed_LE - start.routed_LE, load_LE), "the same tokens"
    after = score.imbalance(end.served_LR - start.served_LR)
    assert after is not None
    assert after.worst == pytest.approx(predicted.worst, rel=0.02)
    for measured, promised in zip(after.per_layer, predicted.per_layer, strict=True):
        assert measured == pytest.approx(promised, rel=0.02), "each layer"
    assert moe.answer(PROMPT) == answer
    moe.patch({"rebalancing": {"mode": "Off", "cooldownSeconds": 0, "windowSeconds": 10}})
    moe.wait_ready()


def pieces(file: str, number: int, characters: int = 400) -> list[str]:
    text = (CHECKOUT / "examples/tiny-moe/heldout" / file).read_text()
    return [text[start : start + characters] for start in range(0, number * characters, characters)]


def walked(moe: Deployment, epoch: int) -> bool:
    """Whether a rebalance has begun after this epoch, and all its waves are in force."""
    placement = moe.placement()
    return bool(
        placement["spec"]["epoch"] > epoch
        and placement["status"].get("appliedEpoch") == placement["spec"]["epoch"]
        and moe.condition("Rebalancing")[1] == "Idle"
        and "imbalancePredicted" in placement["status"]
    )


def test_rebalance_with_the_operator_killed_in_the_middle(moe: Deployment, answer: str) -> None:
    epoch = moe.placement()["spec"]["epoch"]
    uids = moe.uids()
    with traffic(moe.addresses() * 2, CODE) as load:
        moe.patch({"rebalancing": {"mode": "Recommend"}})
        moe.wait(
            lambda: any(d["verdict"] == "Recommended" for d in moe.status.get("decisions", [])),
            "a recommendation under code traffic",
        )
        assert moe.placement()["spec"]["epoch"] == epoch, "a recommendation moves nothing"
        moe.patch({"rebalancing": {"mode": "Auto", "budget": {"maxBytesPerSecond": 1_000_000}}})
        moe.wait(lambda: moe.placement()["spec"]["epoch"] > epoch, "the first wave")
        moe.cluster.kubectl(
            "-n", OPERATOR_NAMESPACE, "delete", "pod", "--all", "--grace-period=0", "--force"
        )
        assert moe.answer(PROMPT) == answer, "served without an operator"
        moe.wait(
            lambda: (
                moe.condition("Rebalancing")[1] == "Idle"
                and moe.placement()["status"]["appliedEpoch"] == moe.placement()["spec"]["epoch"]
            ),
            "the new operator to converge",
        )
        assert moe.answer(PROMPT) == answer
    assert load.failed == []
    assert load.served > 0
    assert moe.placement()["spec"]["epoch"] > epoch
    assert moe.uids() == uids, "a rebalance restarts nobody"
    moe.patch({"rebalancing": {"mode": "Off"}})
    moe.wait_ready()


def test_lost_pod_leaves_survivors_serving_and_heals(moe: Deployment, answer: str) -> None:
    generation = moe.placement()["spec"]["generation"]
    members = moe.placement()["spec"]["members"]
    addresses, victim = moe.addresses(), members[-1]
    with traffic(addresses[:-1], CODE) as load:
        wait_until(lambda: load.served >= 2, 60, "traffic")
        moe.kubectl("delete", "pod", victim["pod"], "--grace-period=0", "--force")
        moe.wait(
            lambda: moe.placement()["spec"]["generation"] > generation, "the survivors' generation"
        )
        served = load.served
        wait_until(lambda: load.served > served or bool(load.failed), 60, "survivors serving on")
        moe.wait(lambda: moe.condition("Ready")[0] == "True", "the replacement to serve")
    assert load.failed == [], "only requests of the lost rank may be lost"
    kept = {m["uid"] for m in moe.placement()["spec"]["members"]} & {m["uid"] for m in members}
    assert kept == {m["uid"] for m in members[:-1]}, "survivors keep their processes"
    assert moe.answer(PROMPT) == answer


def test_evictions_take_one_rank_at_a_time(moe: Deployment) -> None:
    first, second, _ = (member["pod"] for member in moe.placement()["spec"]["members"])
    moe.wait(
        lambda: moe.get("pdb", names.group_name(moe.name, 0))["status"]["disruptionsAllowed"] == 1,
        "a budget that allows one eviction",
    )
    assert isinstance(moe.get("pdb", names.group_name(moe.name, 0))["spec"]["minAvailable"], int)
    evict(moe, first)
    with pytest.raises(ApiError) as refused:
        evict(moe, second)
    assert refused.value.status == 429
    moe.wait(
        lambda: (
            moe.condition("Ready")[0] == "True"
            and first not in {member["pod"] for member in moe.placement()["spec"]["members"]}
        ),
        "three ranks serving again",
    )
    moe.wait(
        lambda: moe.get("pdb", names.group_name(moe.name, 0))["status"]["disruptionsAllowed"] == 1,
        "the budget to allow one more",
    )


def evict(moe: Deployment, pod: str) -> None:
    path = f"/api/v1/namespaces/{moe.namespace}/pods/{pod}/eviction"
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": moe.namespace},
    }
    moe.cluster.api.request("POST", path, body)


def test_experts_leave_a_cordoned_node_before_its_pod_may_go(moe: Deployment, answer: str) -> None:
    nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in moe.pods()}
    alone = [name for name, node in nodes.items() if list(nodes.values()).count(node) == 1]
    pods = [member["pod"] for member in moe.placement()["spec"]["members"]]
    rank = pods.index(alone[0])
    moe.cluster.kubectl("cordon", nodes[alone[0]])
    try:
        moe.wait(
            lambda: (
                bool((moe.plan().slots()[:, rank] == -1).all())
                and moe.placement()["status"]["appliedEpoch"] == moe.plan().epoch
            ),
            "its rank to hold nothing",
        )
        assert "Evacuation" in [decision["reason"] for decision in moe.status["decisions"]]
        moe.wait(
            lambda: moe.get("pdb", names.group_name(moe.name, 0))["status"]["disruptionsAllowed"],
            "the budget to let its pod go",
        )
        for address in moe.addresses():
            assert moe.answer(PROMPT, address=address) == answer, "the empty rank serves on"
    finally:
        moe.cluster.kubectl("uncordon", nodes[alone[0]])


def test_changed_image_replaces_every_pod_once(moe: Deployment, answer: str) -> None:
    before = moe.uids()
    seen: set[str] = set()
    moe.apply(worker={"image": SAME_HOST_IMAGE})

    def rolled() -> bool:
        seen.update(moe.uids())
        return moe.condition("Ready")[0] == "True" and not before & moe.uids()

    moe.wait(lambda: moe.condition("Progressing") == ("True", "RollingOut"), "the roll-out")
    moe.wait(rolled, "pods of the new template")
    moe.wait_ready()
    assert len(seen - before) == 3, "each member was replaced exactly once"
    assert {pod["spec"]["containers"][0]["image"] for pod in moe.pods()} == {SAME_HOST_IMAGE}
    assert moe.answer(PROMPT) == answer


def test_deleted_deployment_leaves_nothing_even_with_the_operator_down(moe: Deployment) -> None:
    operator = ("-n", OPERATOR_NAMESPACE, "scale", "deploy", "moe-operator")
    moe.cluster.kubectl(*operator, "--replicas=0")
    try:
        wait_until(
            lambda: (
                not json.loads(
                    moe.cluster.kubectl("-n", OPERATOR_NAMESPACE, "get", "pods", "-o", "json")
                )["items"]
            ),
            60,
            "the operator to end",
        )
        moe.kubectl("delete", "moed", moe.name, "--wait=false")
        kinds = "pods,services,configmaps,secrets,pdb,xp"
        selector = f"{names.LABEL_DEPLOYMENT}={moe.name}"
        wait_until(
            lambda: (
                not json.loads(moe.kubectl("get", kinds, "-l", selector, "-o", "json"))["items"]
            ),
            90,
            "garbage collection",
        )
    finally:
        moe.cluster.kubectl(*operator, "--replicas=1")
        moe.cluster.kubectl(
            "-n", OPERATOR_NAMESPACE, "rollout", "status", "deploy/moe-operator", "--timeout=90s"
        )
