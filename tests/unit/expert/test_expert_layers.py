"""The expert layer of one rank: which copy serves, over steps that succeed, fail and switch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher, DispatchShape
from moe_worker.expert.exchange import LocalExchange
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.routing_table import RoutingTable

HIDDEN = 4
TWICE = np.asarray([[[0, 0]]], dtype=np.int32)


class Alone:
    """One layer with one expert in two slots."""

    def __init__(self) -> None:
        self.counters = LoadCounters(1, 1, 2)
        self.layers = ExpertLayers(ExpertBank(1, 2, 4, HIDDEN, torch.float32), self.counters)
        self.layers.join(Dispatcher(LocalExchange(), DispatchShape(HIDDEN, 1, 2, torch.float32)))
        self.split(0.5)

    def split(self, first: float) -> None:
        """A new epoch with this share for the first copy."""
        fractions = np.asarray([[[first, 1 - first]]])
        self.layers.switch(RoutingTable.build(TWICE, fractions, 1, member=0))

    def step(self, tokens: int = 1, *, commit: bool = True) -> None:
        self.layers.begin_step([tokens])
        ids = torch.zeros((tokens, 1), dtype=torch.int64)
        self.layers.run(0, torch.ones((tokens, HIDDEN)), ids, torch.ones((tokens, 1)))
        if commit:
            self.layers.commit_step()

    @property
    def served(self) -> list[int]:
        return self.counters.snapshot().served_LS[0]


def test_a_copy_gets_its_share_though_every_step_is_another_epoch():
    rank = Alone()
    for _ in range(200):
        rank.split(0.75)
        rank.step()
    assert rank.served[0] == pytest.approx(150, abs=4)


def test_a_failed_step_is_run_again_with_the_same_copies():
    rank, undisturbed = Alone(), Alone()
    for tokens in (3, 1, 1, 5, 2):
        rank.step(tokens, commit=False)
        rank.step(tokens)
        undisturbed.step(tokens)
    assert rank.served == undisturbed.served


def test_an_epoch_of_fractions_alone_shifts_the_tokens():
    rank = Alone()
    rank.step(100)
    before = rank.served
    rank.split(0.9)
    rank.step(1000)
    assert before[0] == pytest.approx(50, abs=3)
    assert rank.served[0] - before[0] == pytest.approx(900, abs=5)


def test_rounds_bound_a_batch_and_change_nothing():
    """One expert's weights, many tokens, ids that name nobody among them."""

    def run(tokens_per_round: int) -> tuple[torch.Tensor, list[int], int]:
        generator = torch.Generator().manual_seed(1)
        bank, counters = ExpertBank(1, 2, 4, HIDDEN, torch.float32), LoadCounters(1, 1, 2)
        bank.w13_LS2IH[0].normal_(generator=generator)
        bank.w2_LSHI[0].normal_(generator=generator)
        layers = ExpertLayers(bank, counters)
        shape = DispatchShape(HIDDEN, 2, 2, torch.float32, tokens_per_round)
        layers.join(Dispatcher(LocalExchange(), shape))
        layers.switch(RoutingTable.build(TWICE, np.asarray([[[0.5, 0.5]]]), 1, member=0))
        layers.begin_step([7])
        ids = torch.tensor([[0, -1], [0, 5]] * 3 + [[-1, -1]])
        x = torch.randn((7, HIDDEN), generator=generator)
        out = layers.run(0, x, ids, torch.ones((7, 2)))
        layers.commit_step()
        counts = counters.snapshot()
        return out, counts.served_LS[0], counts.invalid_expert_ids

    whole, in_rounds = run(512), run(2)
    assert torch.equal(in_rounds[0], whole[0])
    assert in_rounds[1:] == whole[1:]
    assert (sum(whole[1]), whole[2]) == (6, 3)
    assert torch.equal(whole[0][6], torch.zeros(HIDDEN))


def test_what_was_not_agreed_is_refused():
    rank = Alone()
    rank.layers.begin_step([2])
    ids = torch.zeros((3, 1), dtype=torch.int64)
    with pytest.raises(ValueError, match="do not fit 2 agreed tokens"):
        rank.layers.run(0, torch.ones((3, HIDDEN)), ids, torch.ones((3, 1)))
