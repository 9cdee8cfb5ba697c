"""One small call of every kernel, with the types of arguments that a model's calls will have.

Neighbour: `moe_kernels.warm_up` runs them; what is called are the contracts, so that nothing is
compiled here that a step would not use.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from moe_kernels.activation import gated
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.bins import BinLayout, Bins
from moe_kernels.copies import Copies, place_choices
from moe_kernels.cpu.arrays import stored_array
from moe_kernels.cpu.jit import CACHE_FOLDER
from moe_kernels.cpu.turns import in_turn
from moe_kernels.dispatch import add_up, pack, unpack
from moe_kernels.expert_parallel import combine_rows, dispatch_rows, serve_rows
from moe_kernels.experts import Experts, add_experts
from moe_kernels.forward import Ends, forward
from moe_kernels.gate import Gate, route
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.grouped_query import GroupedQueryLayer, grouped_query
from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import KvPages, allocate_pages, append
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_kernels.permute import sort_by_slot
from moe_kernels.router import RouterSpec
from moe_kernels.sampling import Cut, sample
from moe_kernels.stack import Stack, StackLayer, run_stack
from moe_kernels.step_tokens import StepTokens
from moe_kernels.warm_up import Needs, Step

_WIDTH = 16
_MANY_LOGITS = 1 << 16
"""Enough for a second thread."""


def steps(needs: Needs) -> list[Step]:
    """In a fixed order, the longest first. Of processes that begin together one compiles a step
    and the others wait for it, to load what it has put into the cache."""
    return [Step(step.name, partial(_in_turn, step)) for step in _all(needs)]


def _in_turn(step: Step) -> None:
    with in_turn(CACHE_FOLDER, step.name):
        step.run()


def _all(needs: Needs) -> list[Step]:
    dtypes = sorted(needs.dtypes, key=str)
    halves = sorted(needs.grouped_query, key=str)
    routers = sorted(needs.routers, key=str)
    every = sorted(needs.dtypes | needs.routers, key=str)
    whole = [
        (dtype, router)
        for dtype in halves
        for router in routers
        if router in (dtype, torch.float32)
    ]
    return [
        *(Step(f"product {_short(dtype)}", partial(_product, dtype)) for dtype in every),
        Step("kv cache", _append),
        *(Step(f"attention half {_short(each)}", partial(_half, each)) for each in halves),
        Step("attention", _attention),
        *(Step(f"experts {_short(dtype)}", partial(_experts, dtype, needs)) for dtype in dtypes),
        *(Step(f"router {_short(dtype)}", partial(_route, dtype)) for dtype in routers),
        *(
            Step(f"layers {_short(dtype)}, gates {_short(gate)}", partial(_layers, dtype, gate))
            for dtype, gate in whole
        ),
        *(Step(f"dispatch {_short(dtype)}", partial(_dispatch, dtype)) for dtype in dtypes),
        *(Step(f"ends {_short(dtype)}", partial(_ends, dtype)) for dtype in dtypes),
        *(Step(f"linear {_short(dtype)}", partial(_linear, dtype)) for dtype in dtypes),
        *(Step(f"norm {_short(dtype)}", partial(_norm, dtype)) for dtype in dtypes),
        Step("rope", _rope),
        Step("activation", lambda: gated(torch.zeros(1, 2 * _WIDTH), needs.act)),
        Step("copies", _copies),
        Step("sampling", _sampling),
        Step("sort", lambda: sort_by_slot(torch.zeros(1, 1, dtype=torch.int64), 1)),
    ]


def _product(dtype: torch.dtype) -> None:
    """What kernels of all kinds call; they are compiled apart from it."""
    stored_array(torch.zeros(1, _WIDTH, dtype=dtype))


def _attention() -> None:
    """Of every format, shape and kind of layer: they are numbers to the kernels, not types."""
    plan = plan_attention([AttentionRows(0, 1, [0])], 16)
    paged_attention(torch.zeros(1, 1, _WIDTH), _pages(), plan)


def _half(dtype: torch.dtype) -> None:
    grouped_query(torch.zeros(1, _WIDTH), _attention_layer(dtype), _pages(), _attention_step())


def _layers(dtype: torch.dtype, router: torch.dtype) -> None:
    """Of a rank that is alone, and of one among others; a group may become either."""
    one = torch.zeros(1, dtype=torch.int64)
    copies, experts = Copies(one.view(1, 1), one.view(1, 1), one), Experts(*_expert(dtype))
    layer = StackLayer(_attention_layer(dtype), _pages(), _gate(router), copies, one, experts)
    stack, turn = Stack((layer,)), one.numpy()
    x, step = torch.zeros(1, _WIDTH), _attention_step()
    run_stack(x, stack, step, turn)
    bins = Bins.allocate(1, 1, BinLayout(_WIDTH, 1, dtype), torch.device("cpu"))
    sent = dispatch_rows(x, stack, 0, step, 0, bins, 1, [0])
    served = serve_rows(bins, [(0, 1)], stack, 0)
    combine_rows(sent, 1, 0, served.y_NH, x, [0], stack, 0)
    rows_VH, angles = torch.zeros(1, _WIDTH, dtype=dtype), torch.zeros(1, _WIDTH // 2)
    ends = Ends(Embedding(rows_VH), angles, angles, Head(rows_VH[0], 1e-6, rows_VH))
    number = np.zeros(1, np.int64)
    tokens = StepTokens(number, np.array([[0, 1, 1]]), number, number, block_size=16)
    forward(tokens, ends, stack, turn)


def _attention_layer(dtype: torch.dtype) -> GroupedQueryLayer:
    w = torch.zeros(3 * _WIDTH, _WIDTH, dtype=dtype)
    return GroupedQueryLayer(1, 1, _WIDTH, 1e-6, norm_H=w[0], qkv_QH=w, o_HQ=w[:_WIDTH])


def _pages() -> KvPages:
    return allocate_pages(KvFormat("bf16"), HeadsShape(1, _WIDTH), 1, 16)


def _attention_step() -> AttentionStep:
    table, plan = torch.zeros(1, _WIDTH // 2), plan_attention([AttentionRows(0, 1, [0])], 16)
    return AttentionStep(table, table, torch.zeros(1, dtype=torch.int64), plan)


def _gate(dtype: torch.dtype) -> Gate:
    gate_EH = torch.zeros(1, _WIDTH, dtype=dtype)
    return Gate(RouterSpec(1, 1), torch.zeros(_WIDTH), 1e-6, gate_EH)


def _expert(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    w13 = torch.zeros(1, 2 * _WIDTH, _WIDTH, dtype=dtype)
    return w13, w13[:, :_WIDTH]


def _append() -> None:
    x = torch.zeros(1, 1, _WIDTH)
    append(_pages(), x, x, torch.zeros(1, dtype=torch.int64))


def _experts(dtype: torch.dtype, needs: Needs) -> None:
    w13, w2 = _expert(dtype)
    biases = (w13[:, :, 0], w2[:, :, 0]) if needs.bias else (None, None)
    x, slots = torch.zeros(1, _WIDTH), torch.zeros(1, 1, dtype=torch.int64)
    # Alone a rank calls the one, in a group the other. Both know dense networks as experts.
    add_experts(x, x, slots, torch.ones(1, 1), Experts(w13, w2, needs.act, *biases))
    offsets = torch.tensor([0, 1])
    expert_mlp(x, offsets, w13, w2, act=needs.act, b13_S2I=biases[0], b2_SH=biases[1])


def _route(dtype: torch.dtype) -> None:
    route(torch.zeros(1, _WIDTH), _gate(dtype))


def _ends(dtype: torch.dtype) -> None:
    rows_VH, number = torch.zeros(1, _WIDTH, dtype=dtype), torch.zeros(1, dtype=torch.int64)
    head_logits(embed(number, Embedding(rows_VH)), number, Head(rows_VH[0], 1e-6, rows_VH))


def _copies() -> None:
    zeros = torch.zeros(1, dtype=torch.int64)
    place_choices(zeros.view(1, 1), Copies(zeros.view(1, 1), zeros.view(1, 1), zeros), zeros, 0)


def _dispatch(dtype: torch.dtype) -> None:
    """Rows on their way between ranks; a group of one may never need it, but groups change."""
    layout, x = BinLayout(_WIDTH, 1, dtype), torch.zeros(1, _WIDTH)
    bins = Bins.allocate(1, 1, layout, torch.device("cpu"))
    here = torch.zeros(1, 1, dtype=torch.int64)
    pack(bins, x, here, 1, [0])
    piece = unpack(bins, [(0, 1)], 1)
    add_up(torch.empty_like(x), here, x[:, :1], 1, 0, piece.rows_PH, piece.row_P, x[:0], [0])


def _linear(dtype: torch.dtype) -> None:
    linear(torch.zeros(1, _WIDTH), torch.zeros(1, _WIDTH, dtype=dtype))


def _norm(dtype: torch.dtype) -> None:
    rms_norm(torch.zeros(1, _WIDTH), torch.zeros(_WIDTH, dtype=dtype), 1e-6)


def _rope() -> None:
    table = torch.zeros(1, _WIDTH // 2)
    rope(torch.zeros(1, 1, _WIDTH), table, table)


def _sampling() -> None:
    """Cuts are numbers to the kernels, not types."""
    for size in (_WIDTH, _MANY_LOGITS):  # without and with other threads
        sample(torch.zeros(2, size), [Cut()] * 2, [0] * 2, [0] * 2)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
