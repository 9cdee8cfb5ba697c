"""Groups over TCP between processes: secrets, ports in use, cut connections, neighbours."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from moe_api.names import EXCHANGE_PORT
from moe_api.plan import GroupPlan
from moe_worker.expert.tcp_meeting import open_door
from tests.support import expert_ranks, worker_processes
from tests.support.worker_processes import Pool, wait_until

pytestmark = pytest.mark.processes
SLOTS = np.arange(2, dtype=np.int32).reshape(1, 2, 1)
generations = itertools.count(1)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with worker_processes.pool(2) as ranks:
        yield ranks


def plan(pool: Pool) -> GroupPlan:
    addresses = [pool.address(index) for index in range(2)]
    return expert_ranks.plan_for(addresses, next(generations), SLOTS)


def test_a_member_with_another_secret_is_no_member(pool: Pool) -> None:
    wanted = plan(pool)
    pool.ranks[0].call(expert_ranks.begin_to_join, wanted, 0)
    pool.ranks[1].call(expert_ranks.begin_to_join, wanted, 1, secret="other")
    wait_until(
        lambda: any("secret" in m.message for m in pool.ranks[1].call(expert_ranks.told)),
        "the reason, at the one that calls",
    )
    ask = pool.ranks[0].call
    wait_until(
        lambda: any(m.failed and m.member_ids == (1,) for m in ask(expert_ranks.told)),
        "the other one is reported missing",
    )
    pool.ranks[1].call(expert_ranks.give_up)
    # The same generation forms once the right one comes, while the first one kept on trying.
    pool.ranks[1].call(expert_ranks.begin_to_join, wanted, 1)
    assert [pool.ranks[i].call(expert_ranks.joined) for i in (0, 1)] == [2, 2]
    assert pool.each(expert_ranks.agree_once, [(3, 20.0), (4, 20.0)]) == [[3, 4], [3, 4]]


def test_a_port_in_use_is_waited_for(pool: Pool) -> None:
    wanted = plan(pool)
    with open_door(pool.address(1), EXCHANGE_PORT):
        for rank in range(2):
            pool.ranks[rank].call(expert_ranks.begin_to_join, wanted, rank)
        wait_until(
            lambda: any("in use" in m.message for m in pool.ranks[1].call(expert_ranks.told)),
            "it says what it waits for",
        )
        told = pool.ranks[1].call(expert_ranks.told)
        assert not any(m.failed or m.member_ids for m in told), "nobody else is to blame"
    assert [pool.ranks[i].call(expert_ranks.joined) for i in (0, 1)] == [2, 2]


def test_no_port_is_held_by_a_group_that_stands(pool: Pool) -> None:
    wanted = plan(pool)
    pool.each(expert_ranks.join, [(wanted, rank) for rank in range(2)])
    for index in range(2):
        open_door(pool.address(index), EXCHANGE_PORT).close()


def test_a_cut_connection_is_noticed_by_both_ends(pool: Pool) -> None:
    wanted = plan(pool)
    pool.each(expert_ranks.join, [(wanted, rank) for rank in range(2)])
    pool.ranks[1].post(expert_ranks.survive_agreements, 60.0)
    assert pool.ranks[0].call(expert_ranks.cut, pool.address(1)) >= 2
    pool.ranks[0].post(expert_ranks.survive_agreements, 60.0)
    answers = [pool.ranks[i].result(20.0) for i in (0, 1)]
    assert [answer["suspects"] for answer in answers] == [(1,), (0,)]


def test_groups_side_by_side_do_not_meet(pool: Pool) -> None:
    with worker_processes.pool(2) as others:
        number = next(generations)
        for ranks in (pool, others):
            wanted = expert_ranks.plan_for([ranks.address(i) for i in range(2)], number, SLOTS)
            for rank in range(2):
                ranks.ranks[rank].call(expert_ranks.begin_to_join, wanted, rank)
        for ranks, values in ((pool, (1, 2)), (others, (3, 4))):
            assert [ranks.ranks[i].call(expert_ranks.joined) for i in (0, 1)] == [2, 2]
            answers = ranks.each(expert_ranks.agree_once, [(value, 20.0) for value in values])
            assert answers == [list(values)] * 2
