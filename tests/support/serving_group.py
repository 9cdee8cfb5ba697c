"""A group of engines in the ranks of a pool, and the test in the place of its operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moe_api.plan import FractionsLRS, GroupPlan, SlotsLRS
from moe_api.worker import WorkerPhase, WorkerState
from tests.support import engine_ranks
from tests.support.engine_ranks import Operator, Result
from tests.support.worker_processes import Pool, Rank, wait_until

VOCABULARY = 96
Prompts = dict[str, list[int]]

FORM_SECONDS = 600.0
"""A first start may compile kernels."""


def prompts(count: int, seed: int = 0) -> Prompts:
    rng = np.random.default_rng(seed)
    return {
        f"r{i}": rng.integers(0, VOCABULARY, size=int(rng.integers(3, 40))).tolist()
        for i in range(count)
    }


class ServingGroup:
    """Members 0 to N−1 on the first N ranks of the pool."""

    def __init__(self, pool: Pool, model: Path, size: int, **config: Any) -> None:
        self.pool, self.model, self.config = pool, model, config
        self.operator = Operator([pool.address(i) for i in range(size)])
        self.plan: GroupPlan | None = None
        for i, rank in enumerate(pool.ranks[:size]):
            rank.post(engine_ranks.start, model, i, pool.address(i), f"inc-{i}", config)
        for rank in pool.ranks[:size]:
            rank.result()

    @property
    def members(self) -> list[int]:
        assert self.plan is not None
        return [member.id for member in self.plan.members]

    def rank(self, member: int) -> Rank:
        return self.pool.ranks[member]

    def restart(self, member: int, incarnation: str) -> None:
        """A new process, waiting for a plan, in the place of a member's old one."""
        self.pool.replace(member)
        self.operator.incarnations[member] = incarnation
        address = self.pool.address(member)
        self.rank(member).call(
            engine_ranks.start, self.model, member, address, incarnation, self.config
        )

    def form(self, members: Iterable[int], slots_LRS: SlotsLRS) -> GroupPlan:
        """Put a new generation to its members and wait until all serve in it."""
        plan = self.operator.form(list(members), slots_LRS)
        self.put(plan)
        self.wait_for(
            lambda s: s.generation == plan.generation and s.phase is WorkerPhase.SERVING,
            f"generation {plan.generation} serving",
            FORM_SECONDS,
        )
        return plan

    def put(self, plan: GroupPlan) -> None:
        self.plan = plan
        for member in self.members:
            answer = self.rank(member).call(engine_ranks.put_plan, plan)
            assert not answer.refused, answer

    def switch(self, slots_LRS: SlotsLRS, fractions_LRS: FractionsLRS | None = None) -> None:
        """Rebalance to a placement and wait until all have it in force."""
        assert self.plan is not None
        plan = self.operator.rebalance(self.plan, slots_LRS, fractions_LRS)
        self.put(plan)
        self.wait_for(lambda s: s.applied_epoch == plan.epoch, f"epoch {plan.epoch} in force")

    def states(self) -> list[WorkerState]:
        return [self.rank(member).call(engine_ranks.state) for member in self.members]

    def wait_for(
        self, condition: Callable[[WorkerState], Any], what: str, timeout_seconds: float = 60.0
    ) -> None:
        wait_until(lambda: all(condition(state) for state in self.states()), what, timeout_seconds)

    def submit(self, requests: dict[str, Sequence[int]], max_tokens: int, temperature: float = 0.0
    ) -> dict[int, list[str]]:  # fmt: skip
        """Deal requests out to the members; returns the ids by member."""
        members = self.members
        shares = {m: list(requests)[i :: len(members)] for i, m in enumerate(members)}
        for member, ids in shares.items():
            share = {request_id: requests[request_id] for request_id in ids}
            self.rank(member).call(engine_ranks.submit, share, max_tokens, temperature)
        return shares

    def results(self, shares: dict[int, list[str]]) -> dict[str, Result]:
        return {
            request_id: result
            for member, ids in shares.items()
            for request_id, result in self.rank(member).call(engine_ranks.results, ids).items()
        }

    def generate(
        self, requests: dict[str, Sequence[int]], max_tokens: int, temperature: float = 0.0
    ) -> dict[str, Result]:
        return self.results(self.submit(requests, max_tokens, temperature))

    def check_slots(self) -> None:
        for member in self.members:
            self.rank(member).call(engine_ranks.check_slots)


def assert_same(got: dict[str, Result], wanted: dict[str, Result]) -> None:
    """The same tokens, ends and logits, bit by bit."""
    assert got.keys() == wanted.keys()
    assert_same_logits(got, wanted, "")


def assert_same_logits(got: dict[str, Result], wanted: dict[str, Result], suffix: str) -> None:
    """The same, for requests whose ids have got a suffix."""
    for name, result in wanted.items():
        assert got[name + suffix].tokens == result.tokens, name
        assert got[name + suffix].digests == result.digests, name
        assert got[name + suffix].finished == result.finished, name


def random_walk(slots_LRS: SlotsLRS, num_steps: int, seed: int) -> list[SlotsLRS]:
    """Placements one wave apart: in each layer one expert is copied into a free slot, and now and
    then a copy is given up."""
    rng = np.random.default_rng(seed)
    walk = []
    current = slots_LRS
    for _ in range(num_steps):
        following = current.copy()
        for layer in range(len(current)):
            free = np.argwhere(current[layer] < 0)
            if len(free):
                rank, slot = free[rng.integers(len(free))]
                following[layer, rank, slot] = rng.integers(current[layer].max() + 1)
            experts, counts = np.unique(following[layer], return_counts=True)
            for expert in experts[(counts > 1) & (experts >= 0)]:
                held = np.argwhere((following[layer] == expert) & (current[layer] == expert))
                if len(held) and rng.random() < 0.7:
                    following[layer, held[0][0], held[0][1]] = -1
        walk.append(following)
        current = following
    return walk
