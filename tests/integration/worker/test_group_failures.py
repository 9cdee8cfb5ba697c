"""What a group does when a member dies, hangs or drains, and when an epoch takes too long."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moe_api.plan import PlanLimits
from moe_api.worker import WorkerPhase
from moe_placement.initial import contiguous
from moe_placement.walk.membership import admit, repair
from tests.support import engine_ranks, worker_processes
from tests.support.engine_ranks import Operator
from tests.support.random_checkpoint import write_random_checkpoint
from tests.support.serving_group import ServingGroup, assert_same, assert_same_logits, prompts
from tests.support.worker_processes import RankError, wait_until

pytestmark = pytest.mark.processes
EXPERTS, LAYERS, SLOTS = 8, 2, 5
PLACEMENT = contiguous(LAYERS, EXPERTS, 3, SLOTS)


@pytest.fixture(scope="module")
def processes() -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(3) as ranks:
        yield ranks


@pytest.fixture
def pool(processes: worker_processes.Pool) -> worker_processes.Pool:
    """With a living process for every rank."""
    for index, rank in enumerate(processes.ranks):
        if not rank.is_usable:
            processes.replace(index)
    return processes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_checkpoint(tmp_path_factory.mktemp("model") / "top2", top_k=2, seed=2)


@pytest.fixture(scope="module")
def wanted(processes: worker_processes.Pool, model: Path) -> dict[str, engine_ranks.Result]:
    """Twenty tokens of six prompts, from one rank that nothing happens to."""
    group = ServingGroup(processes, model, 1)
    group.form([0], contiguous(LAYERS, EXPERTS, 1, EXPERTS))
    return group.generate(prompts(6), 20)


def serving(pool: worker_processes.Pool, model: Path, **config: object) -> ServingGroup:
    group = ServingGroup(pool, model, 3, **config)
    group.form(range(3), PLACEMENT)
    return group


def wait_for_tokens(group: ServingGroup, shares: dict[int, list[str]]) -> None:
    """Until every request has begun to answer."""
    for member, ids in shares.items():
        for request_id in ids:
            wait_until(
                lambda m=member, r=request_id: group.rank(m).call(engine_ranks.num_tokens, r),
                f"the first token of {request_id}",
            )


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_survivors_of_a_killed_rank_go_on_with_the_same_text(
    pool: worker_processes.Pool,
    model: Path,
    wanted: dict[str, engine_ranks.Result],
    transport: str,
) -> None:
    group = serving(pool, model, operation_timeout_seconds=60.0, transport=transport)
    shares = group.submit(prompts(6), 20)
    wait_for_tokens(group, shares)
    group.rank(1).signal(signal.SIGKILL)
    survivors = [0, 2]
    for member in survivors:
        wait_until(
            lambda m=member: group.rank(m).call(engine_ranks.state).phase
            is WorkerPhase.DISRUPTED,
            "disrupted, long before the time-out", timeout_seconds=20.0,
        )  # fmt: skip
        state = group.rank(member).call(engine_ranks.state)
        assert 1 in state.suspects
        assert state.requests_running == 2, "its sequences are kept"
        with pytest.raises(RankError, match="NotAdmitting"):
            group.rank(member).call(engine_ranks.submit, {"new": [1, 2, 3]}, 1)
    group.form(survivors, repair(PLACEMENT, survivors, EXPERTS))
    kept = {member: shares[member] for member in survivors}
    got = group.results(kept)
    assert_same(got, {name: wanted[name] for name in got})
    group.check_slots()

    # A replacement under the same member id comes back while the others serve.
    group.restart(1, "inc-1b")
    shares = group.submit({f"{name}-x": p for name, p in prompts(6).items()}, 20)
    group.form([0, 1, 2], admit(repair(PLACEMENT, survivors, EXPERTS), [0, None, 1], EXPERTS, 4))
    assert_same_logits(group.results(shares), wanted, "-x")
    again = {f"{name}-y": prompt for name, prompt in prompts(6).items()}
    assert_same_logits(group.generate(again, 20), wanted, "-y")
    group.check_slots()


def test_a_hung_rank_is_noticed_at_the_time_out_of_an_operation(
    pool: worker_processes.Pool, model: Path, wanted: dict[str, engine_ranks.Result]
) -> None:
    group = serving(pool, model, operation_timeout_seconds=2.0)
    shares = group.submit(prompts(6), 20)
    wait_for_tokens(group, shares)
    group.rank(2).signal(signal.SIGSTOP)
    survivors = [0, 1]
    for member in survivors:
        wait_until(
            lambda m=member: group.rank(m).call(engine_ranks.state).phase
            is WorkerPhase.DISRUPTED,
            "disrupted",
        )  # fmt: skip
    suspects = [group.rank(m).call(engine_ranks.state).suspects for m in survivors]
    assert any(2 in found for found in suspects), suspects
    group.form(survivors, repair(PLACEMENT, survivors, EXPERTS))
    got = group.results({member: shares[member] for member in survivors})
    assert_same(got, {name: wanted[name] for name in got})

    # When it wakes up it finds itself out of the group, and says so.
    group.rank(2).signal(signal.SIGCONT)
    assert group.plan is not None
    group.rank(2).call(engine_ranks.put_plan, group.plan)
    ended = group.rank(2).call(engine_ranks.results, shares[2])
    assert {result.finished.reason for result in ended.values()} == {"error"}
    assert group.rank(2).call(engine_ranks.state).phase is WorkerPhase.WAITING


def test_an_epoch_past_its_deadline_is_abandoned_by_all_and_changes_no_table(
    pool: worker_processes.Pool, model: Path, wanted: dict[str, engine_ranks.Result]
) -> None:
    group = serving(pool, model)
    before = [state.slots for state in group.states()]
    target = PLACEMENT.copy()
    target[:, 0, -1] = EXPERTS - 1
    group.operator.limits = PlanLimits(max_bytes_per_second=1, deadline_seconds=1)
    assert group.plan is not None
    plan = group.operator.rebalance(group.plan, target)
    group.put(plan)
    shares = group.submit(prompts(6), 20)
    group.wait_for(lambda s: s.abandoned_epoch == plan.epoch, "the epoch is abandoned")
    states = group.states()
    assert [state.slots for state in states] == before
    assert {state.applied_epoch for state in states} == {plan.epoch - 1}
    assert all("deadline" in state.migration.error for state in states if state.migration)
    assert_same(group.results(shares), wanted)

    # The abandoned epoch stays so; the next one works.
    group.operator.limits = PlanLimits()
    group.switch(target)
    assert group.operator.epoch == plan.epoch + 1
    group.check_slots()
    states = group.states()
    assert [state.migration.moves_done for state in states if state.migration] == [LAYERS, 0, 0]


def test_an_epoch_that_one_rank_cannot_stage_is_abandoned_by_all(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = serving(pool, model)
    target = PLACEMENT.copy()
    target[1, 2, 0] = 0  # in use
    target[1, 2, -1] = PLACEMENT[1, 2, 0]
    assert group.plan is not None
    plan = group.operator.rebalance(group.plan, target)
    answers = [group.rank(member).call(engine_ranks.put_plan, plan) for member in group.members]
    group.wait_for(lambda s: s.abandoned_epoch == plan.epoch, "the epoch is abandoned")
    assert not answers[0].refused
    for answer, state in zip(answers, group.states(), strict=True):
        if answer.refused:  # the others had abandoned it before it came here
            assert "was abandoned by the group" in answer.reason
        else:
            assert state.migration is not None
            assert "layer 1 rank 2 slot 0 holds expert" in (state.migration.error or "")


def test_weights_come_from_the_next_holder_or_the_checkpoint_when_a_peer_refuses(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = serving(pool, model)
    group.rank(2).call(engine_ranks.refuse_pulls)
    target = PLACEMENT.copy()
    target[:, 0, -1] = EXPERTS - 1  # held by rank 2 alone
    group.switch(target)
    group.check_slots()


def test_plans_that_are_old_or_for_another_are_refused(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = serving(pool, model)
    old = group.plan
    assert old is not None
    rank = group.rank(0)
    assert not rank.call(engine_ranks.put_plan, old).refused, "the same twice is a no-op"
    group.switch(PLACEMENT[:, :, ::-1].copy()[:, :, ::-1])
    answer = rank.call(engine_ranks.put_plan, old)
    assert answer.refused
    assert answer.in_force == group.plan.fence
    # A worker outside a group takes no plan that names somebody else in its place.
    group.restart(1, "inc-1b")
    answer = pool.ranks[1].call(engine_ranks.put_plan, group.plan)
    assert answer.refused
    assert "inc-1b" in answer.reason


def test_a_group_grows_and_shrinks_while_it_serves(
    pool: worker_processes.Pool, model: Path, wanted: dict[str, engine_ranks.Result]
) -> None:
    group = ServingGroup(pool, model, 3)
    two = contiguous(LAYERS, EXPERTS, 2, 6)
    group.form([0, 2], two)
    shares = group.submit(prompts(6), 20)
    # A member comes, with another number of slots a rank, between the two that serve.
    grown = admit(two, [0, None, 1], EXPERTS, 5)[:, :, :5]
    group.form([0, 1, 2], grown)
    assert_same(group.results(shares), wanted)
    group.check_slots()
    # It drains and goes; what it was generating is finished first.
    shares = group.submit({f"{n}-d": p for n, p in prompts(6).items()}, 20)
    group.rank(1).call(engine_ranks.drain)
    state = group.rank(1).call(engine_ranks.state)
    assert state.phase is WorkerPhase.DRAINING
    with pytest.raises(RankError, match="NotAdmitting"):
        group.rank(1).call(engine_ranks.submit, {"new": [1, 2, 3]}, 1)
    assert_same_logits(group.results(shares), wanted, "-d")
    assert not group.rank(1).call(engine_ranks.left_group)
    plan = group.operator.form([0, 2], repair(grown, [0, 2], EXPERTS))
    for member in (0, 1, 2):
        group.rank(member).call(engine_ranks.put_plan, plan)
    group.plan = plan
    group.wait_for(lambda s: s.generation == plan.generation, "the generation without it")
    wait_until(lambda: group.rank(1).call(engine_ranks.left_group), "it has left")
    after = {f"{name}-e": prompt for name, prompt in prompts(6).items()}
    assert_same_logits(group.generate(after, 20), wanted, "-e")


def test_a_group_in_which_everybody_drains_dissolves(
    pool: worker_processes.Pool, model: Path, wanted: dict[str, engine_ranks.Result]
) -> None:
    group = serving(pool, model)
    shares = group.submit(prompts(6), 20)
    for member in range(3):
        group.rank(member).call(engine_ranks.drain)
    assert_same(group.results(shares), wanted)
    for member in range(3):
        wait_until(
            lambda m=member: group.rank(m).call(engine_ranks.left_group), "everybody has left"
        )


def test_a05_formation_and_warm_up_do_not_count_as_load(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = serving(pool, model)
    for member in range(3):
        steps = group.rank(member).call(engine_ranks.load).steps
        wait_until(
            lambda m=member, s=steps: group.rank(m).call(engine_ranks.load).steps > s,
            "idle steps",
        )
        load = group.rank(member).call(engine_ranks.load)
        assert not np.any(load.routed)
        assert not np.any(load.served)
    group.generate(prompts(3), 2)
    assert all(np.any(group.rank(m).call(engine_ranks.load).routed) for m in range(3))


def test_g12_the_load_of_a_group_counts_every_real_token_once(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = serving(pool, model)
    requests = prompts(6)
    group.generate(requests, 5)
    loads = [group.rank(member).call(engine_ranks.load) for member in range(3)]
    # The last token of an answer is drawn but never fed to the model.
    tokens = sum(len(prompt) + 4 for prompt in requests.values())
    routed = np.sum([load.routed for load in loads], axis=0)
    served = np.sum([np.sum(load.served, axis=1) for load in loads], axis=0)
    assert routed.sum(axis=1).tolist() == [2 * tokens] * LAYERS
    assert served.tolist() == [2 * tokens] * LAYERS


def test_f18_a_worker_waits_for_the_store_and_names_its_address(
    pool: worker_processes.Pool, model: Path
) -> None:
    addresses = [pool.address(i) for i in range(3)]
    operator = Operator(addresses)
    plan = operator.form([0, 1], contiguous(LAYERS, EXPERTS, 2, SLOTS))
    late, early = pool.ranks[0], pool.ranks[1]
    late.call(engine_ranks.stop)
    early.call(engine_ranks.start, model, 1, addresses[1], "inc-1", {}, missing_grace_seconds=0.5)
    early.call(engine_ranks.put_plan, plan)
    state = wait_until(
        lambda: (s := early.call(engine_ranks.state)).missing_members and s,
        "it says who is missing",
    )
    assert state.phase is WorkerPhase.JOINING
    assert state.prepared_generation == plan.generation
    assert state.missing_members == [0]
    assert f"{addresses[0]}:" in state.last_error
    # The late one comes, under its address, and the group forms without anybody starting anew.
    late.call(engine_ranks.start, model, 0, addresses[0], "inc-0", {})
    late.call(engine_ranks.put_plan, plan)
    for rank in (late, early):
        wait_until(
            lambda r=rank: r.call(engine_ranks.state).phase is WorkerPhase.SERVING, "serving"
        )
    assert early.call(engine_ranks.state).missing_members == []
    assert early.call(engine_ranks.generate, {"x": [1, 2, 3]}, 3)["x"].finished.reason == "length"


def test_members_that_hold_another_plan_are_not_let_in(
    pool: worker_processes.Pool, model: Path
) -> None:
    group = ServingGroup(pool, model, 2)
    plan = group.operator.form([0, 1], contiguous(LAYERS, EXPERTS, 2, SLOTS))
    other = group.operator.rebalance(plan, contiguous(LAYERS, EXPERTS, 2, SLOTS + 1))
    group.rank(0).call(engine_ranks.put_plan, plan)
    group.rank(1).call(engine_ranks.put_plan, other)
    waiting = wait_until(
        lambda: (s := group.rank(1).call(engine_ranks.state)).last_error and s, "it waits"
    )
    assert waiting.phase is WorkerPhase.JOINING
    # As soon as both have the newer one they form.
    group.put(other)
    group.wait_for(lambda s: s.phase is WorkerPhase.SERVING, "serving")
    assert {s.applied_epoch for s in group.states()} == {other.epoch}
