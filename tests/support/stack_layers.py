"""Small layers for tests of whole runs of them: made of a seed, with two copies of two experts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from moe_kernels.activation import SILU, SwigluOai
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.copies import Copies
from moe_kernels.experts import Experts
from moe_kernels.gate import Gate
from moe_kernels.grouped_query import GroupedQueryLayer
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, allocate_pages
from moe_kernels.mlp import Mlp
from moe_kernels.router import RouterSpec
from moe_kernels.stack import Counts, Stack, StackLayer

HIDDEN, HEADS, DIM, EXPERTS, SLOTS, INTERMEDIATE = 48, 2, 32, 6, 8, 24
BLOCK, BLOCKS_EACH = 16, 2
BLOCKS = 4 * BLOCKS_EACH


class Made:
    """The same tensors of the same seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * shape[-1] ** -0.5).to(dtype)

    def layer(
        self,
        kv: KvFormatName,
        top_k: int = 2,
        with_bias: bool = False,
        window: int | None = None,
        shared: bool = False,
        gated: bool = False,
        multiplier: float = 1.0,
        sinks: bool = False,
        heads: int = HEADS,
        blocks: int = BLOCKS,
    ) -> StackLayer:
        act = SwigluOai() if with_bias else SILU
        rows = (heads + 2 * HEADS) * DIM
        attention = GroupedQueryLayer(
            heads,
            HEADS,
            DIM,
            1e-5,
            norm_H=1 + self.normal(HIDDEN),
            qkv_QH=4 * self.normal(rows, HIDDEN),
            o_HQ=self.normal(HIDDEN, heads * DIM),
            qkv_bias_Q=self.normal(rows, dtype=torch.float32) if with_bias else None,
            o_bias_H=self.normal(HIDDEN, dtype=torch.float32) if with_bias else None,
            window=window,
            sinks_N=self.normal(heads, dtype=torch.float32) if sinks else None,
        )
        gate = Gate(
            RouterSpec(EXPERTS, top_k),
            1 + self.normal(HIDDEN),
            1e-5,
            4 * self.normal(EXPERTS, HIDDEN),
        )
        # Two experts have a second copy.
        physical_EC = torch.tensor(
            [[e, EXPERTS + e if e < SLOTS - EXPERTS else -1] for e in range(6)]
        )
        whole = 1 << 32
        edges_EC = torch.tensor([[whole // 3 if e < 2 else whole, whole] for e in range(6)])
        experts = Experts(
            self.normal(SLOTS, 2 * INTERMEDIATE, HIDDEN),
            self.normal(SLOTS, HIDDEN, INTERMEDIATE),
            act,
            self.normal(SLOTS, 2 * INTERMEDIATE) if with_bias else None,
            self.normal(SLOTS, HIDDEN) if with_bias else None,
        )
        gate_1H = self.normal(1, HIDDEN) if gated else None
        network = Mlp(self.normal(2 * 16, HIDDEN), self.normal(HIDDEN, 16), act, gate_1H)
        return StackLayer(
            attention,
            pages(kv, blocks),
            gate,
            Copies(physical_EC, edges_EC, torch.arange(EXPERTS) * 12345678901234567),
            torch.arange(EXPERTS) * 3,
            experts,
            network if shared else None,
            multiplier,
        )


def pages(kv: KvFormatName, blocks: int = BLOCKS) -> KvPages:
    return allocate_pages(KvFormat(kv), HeadsShape(HEADS, DIM), blocks, BLOCK)


def a_step(made: Made, spans: list[tuple[int, int]]) -> AttentionStep:
    """By sequence, the position of its first token and how many."""
    rows, slots = [], []
    for seq, (start, count) in enumerate(spans):
        table = [4 * place + seq for place in range(BLOCKS_EACH)]
        rows.append(AttentionRows(start, count, table))
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + count)]
    angles = made.normal(len(slots), DIM // 2, dtype=torch.float32)
    plan = plan_attention(rows, BLOCK)
    return AttentionStep(angles.cos(), angles.sin(), torch.tensor(slots, dtype=torch.int64), plan)


def on_other_pages(stack: Stack, kv: KvFormatName) -> Stack:
    return Stack(
        tuple(replace(layer, pages=pages(kv, layer.pages.num_blocks)) for layer in stack.layers)
    )


def assert_same_pages(one: Stack, other: Stack) -> None:
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        for stored, written in zip(ours.pages.tensors, theirs.pages.tensors, strict=True):
            assert torch.equal(stored.view(torch.uint8), written.view(torch.uint8))


def assert_same(found: tuple[Tensor, Counts], expected: tuple[Tensor, Counts]) -> None:
    assert torch.equal(found[0], expected[0])
    assert np.array_equal(found[1].chosen_LE, expected[1].chosen_LE)
    assert np.array_equal(found[1].served_LS, expected[1].served_LS)
    assert found[1].num_strangers == expected[1].num_strangers == 0
