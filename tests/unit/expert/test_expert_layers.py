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
