"""Whole layers of a rank that is alone: what layer by layer gives, and nothing kept that is old."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.forward import Ends
from moe_kernels.gate import Gate
from moe_kernels.grouped_query import GroupedQueryLayer, grouped_query
from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import KvPages, allocate_pages
from moe_kernels.router import RouterSpec
from moe_kernels.step_tokens import StepTokens
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher, DispatchShape
from moe_worker.expert.exchange import LocalExchange
from moe_worker.expert.layer import ExpertLayers
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.routing_table import RoutingTable
from moe_worker.model.layer_run import LayerRun
from moe_worker.model.second_half import ExpertHalf

pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

LAYERS, HIDDEN, WIDTH, EXPERTS, SLOTS, TOKENS, LARGEST = 3, 32, 32, 4, 6, 5, 8
SLOTS_LRS = np.tile(np.asarray([0, 1, 2, 3, 0, 1], dtype=np.int32), (LAYERS, 1, 1))


class Rank:
    """A first layer without experts, then LAYERS with them."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5)
        self.counters = LoadCounters(LAYERS, EXPERTS, SLOTS)
        self.bank = ExpertBank(LAYERS, SLOTS, 16, HIDDEN, torch.float32)
        for weights in (*self.bank.w13_LS2IH, *self.bank.w2_LSHI):
            weights.copy_(self.normal(*weights.shape))
        self.experts = ExpertLayers(self.bank, self.counters)
        self.join()
        self.switch(0.5)
        halves = [
            ExpertHalf(
                Gate(
                    RouterSpec(EXPERTS, 2), self.normal(HIDDEN), 1e-6, self.normal(EXPERTS, HIDDEN)
                ),
                None,
                1.0,
            )
            for _ in range(LAYERS)
        ]
        attentions = [
            GroupedQueryLayer(
                1, 1, WIDTH, 1e-6,
                self.normal(HIDDEN), self.normal(3 * WIDTH, HIDDEN), self.normal(HIDDEN, WIDTH),
            )
            for _ in range(LAYERS)
        ]  # fmt: skip
        self.run = LayerRun(1, 0, tuple(zip(attentions, halves, strict=True)))
        self.pages_L = tuple(a_cache() for _ in range(1 + LAYERS))
        self.x_TH = self.normal(TOKENS, HIDDEN)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5

    def join(self) -> None:
        shape = DispatchShape(HIDDEN, 2, SLOTS, torch.float32, LARGEST)
        self.experts.join(Dispatcher(LocalExchange(), shape))

    def switch(self, first: float) -> None:
        shares = np.ones(SLOTS_LRS.shape)
        shares[..., :2], shares[..., 4:] = first, 1 - first
        self.experts.switch(RoutingTable.build(SLOTS_LRS, shares, EXPERTS, member=0))

    def whole(self) -> Tensor | None:
        self.experts.begin_step([TOKENS])
        found = self.experts.whole(self.run, self.pages_L, self.x_TH, a_step())
        self.experts.commit_step()
        return found

    def one_by_one(self) -> Tensor:
        self.experts.begin_step([TOKENS])
        x_TH = self.x_TH
        for ordinal, (attention, half) in enumerate(self.run.layers):
            x_TH = grouped_query(x_TH, attention, self.pages_L[1 + ordinal], a_step())
            x_TH = self.experts(ordinal, x_TH, half)
        self.experts.commit_step()
        return x_TH


def ends_of(rank: Rank) -> Ends:
    rows_VH, angles = rank.normal(9, HIDDEN), torch.ones(16, WIDTH // 2)
    return Ends(Embedding(rows_VH), angles, angles, Head(rank.normal(HIDDEN), 1e-6, rows_VH))


def the_tokens(num_tokens: int = TOKENS) -> StepTokens:
    spans_SC = np.array([[0, num_tokens, 1]])
    return StepTokens(np.arange(num_tokens), spans_SC, np.zeros(1, np.int64), np.array([1, 4]), 16)


def a_cache() -> KvPages:
    return allocate_pages(KvFormat("fp32"), HeadsShape(1, WIDTH), 1, 16)


def a_step() -> AttentionStep:
    angles = torch.ones(TOKENS, WIDTH // 2)
    plan = plan_attention([AttentionRows(0, TOKENS, [0])], 16)
    return AttentionStep(angles, angles, torch.arange(TOKENS), plan)


def assert_alike(one: Rank, other: Rank) -> None:
    found = one.whole()
    assert found is not None
    assert torch.equal(found, other.one_by_one())
    assert one.counters.snapshot() == other.counters.snapshot()


def test_they_give_what_layer_by_layer_gives_after_every_change() -> None:
    one, other = Rank(), Rank()
    for share in (0.5, 0.9):
        for rank in (one, other):
            rank.switch(share)
        for _ in range(3):
            assert_alike(one, other)
    for rank in (one, other):
        rank.pages_L = tuple(a_cache() for _ in range(1 + LAYERS))
    assert_alike(one, other)
    for rank in (one, other):
        rank.bank.resize(SLOTS + 1)
        rank.counters.resize(SLOTS + 1)
        rank.bank.w2_LSHI[0].mul_(2)
    assert_alike(one, other)


def test_a_whole_model_gives_what_its_ends_around_the_layers_give() -> None:
    one, other = Rank(), Rank()
    ends, tokens = ends_of(one), the_tokens()
    for rank in (one, other):
        rank.run = replace(rank.run, first_layer=0)
    other.x_TH = embed(tokens.ids_T, ends.embedding)
    for _ in range(3):
        one.experts.begin_step([TOKENS])
        found = one.experts.forward(one.run, one.pages_L, tokens, ends)
        one.experts.commit_step()
        assert found is not None
        whole_TH = other.whole()
        assert whole_TH is not None
        assert torch.equal(found, head_logits(whole_TH, tokens.sample_rows_B, ends.head))
        assert one.counters.snapshot() == other.counters.snapshot()


def test_a_whole_model_is_refused_as_its_layers_are() -> None:
    rank = Rank()
    rank.run, ends = replace(rank.run, first_layer=0), ends_of(rank)
    rank.experts.begin_step([LARGEST + 1])
    assert rank.experts.forward(rank.run, rank.pages_L, the_tokens(LARGEST + 1), ends) is None
    with pytest.raises(ValueError, match=f"do not fit {LARGEST + 1} agreed tokens"):
        rank.experts.forward(rank.run, rank.pages_L, the_tokens(), ends)


def test_more_tokens_than_a_round_are_left_to_the_single_layers() -> None:
    rank = Rank()
    rank.experts.begin_step([LARGEST + 1])
    many_TH = rank.normal(LARGEST + 1, HIDDEN)
    assert rank.experts.whole(rank.run, rank.pages_L, many_TH, a_step()) is None


def test_what_was_not_agreed_is_refused() -> None:
    rank = Rank()
    rank.experts.begin_step([TOKENS + 1])
    with pytest.raises(ValueError, match=f"do not fit {TOKENS + 1} agreed tokens"):
        rank.experts.whole(rank.run, rank.pages_L, rank.x_TH, a_step())


def test_a_resized_bank_is_let_go_of_when_the_rank_joins() -> None:
    rank = Rank()
    rank.whole()
    rank.one_by_one()
    old = [weakref.ref(weights) for weights in rank.bank.w13_LS2IH]
    rank.bank.resize(SLOTS + 1)
    rank.join()
    gc.collect()
    assert [ref() for ref in old] == [None] * LAYERS
