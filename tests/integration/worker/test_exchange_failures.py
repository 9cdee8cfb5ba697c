"""A rank that dies, hangs or leaves: the others notice in time and say whom it failed on."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest

from moe_api.worker import Carrier
from tests.support import expert_ranks, worker_processes

pytestmark = pytest.mark.processes
SLOTS = np.arange(3, dtype=np.int32).reshape(1, 3, 1)
generations = itertools.count(1)


@pytest.fixture(params=["tcp", "gloo"])
def carrier(request: pytest.FixtureRequest) -> Carrier:
    return cast(Carrier, request.param)


@pytest.fixture
def pool(carrier: Carrier) -> Iterator[worker_processes.Pool]:
    with worker_processes.pool(3) as ranks:
        plan = expert_ranks.plan_for([ranks.address(i) for i in range(3)], next(generations), SLOTS)
        ranks.each(expert_ranks.join, [(plan, rank) for rank in range(3)], carrier=carrier)
        yield ranks


def test_a_killed_rank_is_noticed_at_once_and_named(pool: worker_processes.Pool) -> None:
    for rank in pool.ranks:
        rank.post(expert_ranks.survive_agreements, 30.0)
    pool.ranks[1].signal(signal.SIGKILL)
    answers = [pool.ranks[i].result(20.0) for i in (0, 2)]
    assert all(1 in answer["suspects"] for answer in answers), answers


def test_a_hung_rank_is_noticed_at_the_time_out(pool: worker_processes.Pool) -> None:
    pool.each(expert_ranks.agree_once, [(rank, 20.0) for rank in range(3)])
    pool.ranks[2].signal(signal.SIGSTOP)
    for index in (0, 1):
        pool.ranks[index].post(expert_ranks.survive_agreements, 1.0)
    answers = [pool.ranks[i].result(20.0) for i in (0, 1)]
    # Whoever runs out of time first closes, which the other may see before its own time is out.
    assert any(answer["suspects"] == (2,) for answer in answers), answers
    assert all(answer["suspects"] for answer in answers), answers
    pool.ranks[2].signal(signal.SIGCONT)


def test_leaving_closes_at_once_for_those_who_wait(pool: worker_processes.Pool) -> None:
    for index in (0, 1):
        pool.ranks[index].post(expert_ranks.survive_agreements, 60.0)
    pool.ranks[2].call(expert_ranks.leave)
    answers = [pool.ranks[i].result(20.0) for i in (0, 1)]
    assert all(2 in answer["suspects"] for answer in answers), answers


def test_survivors_form_a_group_again_with_a_newcomer(
    pool: worker_processes.Pool, carrier: Carrier
) -> None:
    pool.ranks[0].signal(signal.SIGKILL)
    pool.replace(0)
    order = [2, 0, 1]
    plan = expert_ranks.plan_for([pool.address(i) for i in order], next(generations), SLOTS)
    for rank, index in enumerate(order):
        pool.ranks[index].post(expert_ranks.join, plan, rank, carrier=carrier)
    assert [pool.ranks[index].result() for index in order] == [3, 3, 3]
