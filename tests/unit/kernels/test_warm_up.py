"""After the warm-up a step compiles nothing, whatever its shapes; progress is told step by step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_kernels import implementation
from moe_kernels.activation import SwigluOai, gated
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.bins import BinLayout, Bins
from moe_kernels.copies import Copies, place_choices
from moe_kernels.dispatch import add_up, pack, unpack
from moe_kernels.expert_parallel import combine_rows, dispatch_rows, serve_rows
from moe_kernels.experts import Experts, add_experts
from moe_kernels.forward import Ends, forward
from moe_kernels.gate import Gate, route
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.grouped_query import GroupedQueryLayer, grouped_query
from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.kv_formats import HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import LayerScales, allocate_pages, append
from moe_kernels.linear import linear
from moe_kernels.mlp import Mlp, add_mlp
from moe_kernels.norm_rope import rms_norm, rope
from moe_kernels.paged_attention import paged_attention
from moe_kernels.permute import sort_by_slot
from moe_kernels.router import RouterSpec
from moe_kernels.sampling import Cut, sample
from moe_kernels.stack import Stack, StackLayer, run_stack
from moe_kernels.step_tokens import StepTokens
from moe_kernels.warm_up import EVERY_NEED, Needs, warm_up, warm_up_steps
from moe_worker.engine.kernel_needs import kernel_needs
from moe_worker.model.config import load_architecture
from tests.support.family_models import save_family
from tests.support.stack_layers import HIDDEN, Made, a_step

pytestmark = pytest.mark.skipif(
    "cpu" not in implementation.available(), reason="numba is not installed"
)
BF16 = torch.bfloat16
DTYPES = frozenset({BF16, torch.float32})
NEEDS = Needs(frozenset({BF16}), SwigluOai(), True, DTYPES, frozenset({BF16}))


def a_layer(tokens: int, hidden: int, inner: int) -> None:
    x = torch.ones(tokens, hidden)
    gate, w13, w2 = (
        torch.ones(shape, dtype=torch.bfloat16)
        for shape in [(3, hidden), (3, 2 * inner, hidden), (3, hidden, inner)]
    )
    linear(rms_norm(x, gate[0], 1e-6), gate)
    normed, ids, weights = route(x, Gate(RouterSpec(3, 2), gate[0], 1e-6, gate))
    route(x, Gate(RouterSpec(3, 2), gate[0], 1e-6, gate.float()))
    shared = Mlp(w13[0], w2[0], NEEDS.act)
    experts = Experts(w13, w2, NEEDS.act, w13[:, :, 0], w2[:, :, 0])
    add_experts(x, normed, ids, weights, experts, shared=shared, multiplier=0.5)
    add_mlp(x, x, Mlp(w13[0], w2[0], NEEDS.act, gate[:1]))
    embed(ids.flatten(), Embedding(gate, 12.0))
    head_logits(x, torch.arange(tokens), Head(gate[0], 1e-6, gate, 8.0))
    numbers = torch.ones(3, dtype=torch.int64)
    place_choices(ids, Copies(numbers[:, None], numbers[:, None] << 32, numbers), numbers, 1 << 61)
    rope(x.view(tokens, 2, -1), torch.ones(tokens, 2), torch.ones(tokens, 2))
    gated(x, NEEDS.act)
    order, offsets = sort_by_slot(torch.arange(tokens).view(-1, 1) % 3, 3)
    bins = Bins.allocate(2, tokens, BinLayout(hidden, 1, torch.bfloat16), torch.device("cpu"))
    here = torch.zeros(tokens, 1, dtype=torch.int64)
    pack(bins, x, here, 3, [1])
    piece = unpack(bins, [(1, tokens)], 3)
    add_up(x.clone(), here, x[:, :1], 3, 0, piece.rows_PH, piece.row_P, x[1:], [0])
    expert_mlp(x[order], offsets, w13, w2, act=NEEDS.act, b13_S2I=w13[:, :, 0], b2_SH=w2[:, :, 0])


def a_share_of_a_layer(tokens: int) -> None:
    """Of a rank among others."""
    made = Made(1)
    stack, step = (
        Stack((made.layer("bf16", with_bias=True, shared=True),)),
        a_step(made, [(0, tokens)]),
    )
    x_TH = torch.ones(tokens, HIDDEN)
    bins = Bins.allocate(2, tokens, BinLayout(HIDDEN, 2, BF16), torch.device("cpu"))
    sent = dispatch_rows(x_TH, stack, 0, step, 1 << 61, bins, 8, [1])
    served = serve_rows(bins, [(1, tokens)], stack, 0)
    combine_rows(sent, 8, 0, served.y_NH, x_TH[:0], [0], stack, 0)


def a_cache(name: KvFormatName, shape: HeadsShape, tokens: int) -> None:
    vectors = torch.ones(shape.kv_heads, shape.head_dim)
    scales = LayerScales(key_center_ND=vectors, key_channel_ND=vectors)
    pages = allocate_pages(KvFormat(name), shape, 40, 16, scales=scales)
    k = torch.ones(tokens, shape.kv_heads, shape.head_dim)
    append(pages, k, k, torch.arange(tokens))
    plan = plan_attention([AttentionRows(0, tokens, range(40))], 16)
    paged_attention(k, pages, plan, window=20, sinks_H=vectors[:, 0])


def an_attention_half(tokens: int) -> None:
    heads, width = 3, 32
    w = torch.ones(3 * heads * width, heads * width, dtype=BF16)
    vectors = torch.ones(heads, width)
    layer = GroupedQueryLayer(
        heads, heads, width, 1e-6, w[0], w, w[: heads * width], vectors.view(-1).repeat(3),
        vectors.view(-1), w[0, :width], w[0, :width], 1.0, 0.1, 20, vectors[:, 0], 0.5,
    )  # fmt: skip
    scales = LayerScales(key_center_ND=vectors, key_channel_ND=vectors)
    shape = HeadsShape(heads, width)
    pages = allocate_pages(KvFormat("nvfp4"), shape, 40, 16, scales=scales)
    angles = torch.ones(tokens, width // 4)
    plan = plan_attention([AttentionRows(0, tokens, range(40))], 16)
    step = AttentionStep(angles, angles, torch.arange(tokens), plan)
    x = torch.ones(tokens, heads * width)
    grouped_query(x, layer, pages, step)
    wide = torch.ones(2, 2 * len(w[0]), len(w[0]), dtype=BF16)
    experts = Experts(wide, wide[:, : len(w[0])].contiguous(), NEEDS.act, wide[..., 0], wide[:, 0])
    none = torch.zeros(2, dtype=torch.int64)
    copies = Copies(none[:, None], none[:, None] + (1 << 32), none)
    for router in (BF16, torch.float32):
        gate = Gate(RouterSpec(2, 1), w[0], 1e-6, w[:2].to(router), vectors[0, :2], None)
        stack, turn = Stack((StackLayer(layer, pages, gate, copies, none, experts),)), np.array([1])
        run_stack(x, stack, step, turn << 60)
        angles = torch.ones(tokens, width // 4)
        ends = Ends(Embedding(w, 12.0), angles, angles, Head(w[0], 1e-6, w, 8.0))
        ids, blocks = np.arange(tokens) % 3, np.arange(-(-tokens // 16))
        spans_SC = np.array([[0, tokens, len(blocks)]])
        forward(StepTokens(ids, spans_SC, blocks, ids, 16), ends, stack, turn)


def test_nothing_is_left_to_compile_in_a_step() -> None:
    from moe_kernels.cpu import (
        attention,
        attention_work,
        copies,
        dispatch,
        expert_parallel,
        experts,
        forward,
        frozen,
        gate,
        grouped_gemm,
        grouped_query_kernel,
        head,
        kv_encode,
        linear,
        norm_rope,
        permute,
        sampling,
        stack,
        step_arrays,
    )

    kernels = [
        grouped_query_kernel.attention_half,
        linear.linear_product,
        grouped_gemm.expert_rows,
        experts.add_expert_rows,
        gate.route_rows,
        copies.place,
        stack.run_layers,
        forward.forward_rows,
        step_arrays.make_step,
        frozen.freeze,
        head.widen_rows,
        head.head_rows,
        norm_rope.norm_rows,
        norm_rope.turn_rows,
        permute.place_pairs,
        dispatch.pack_rows,
        dispatch.unpack_rows,
        dispatch.add_rows,
        expert_parallel.dispatch_layer,
        expert_parallel.serve_layer,
        expert_parallel.combine_layer,
        attention_work.cut_units,
        attention.attend_all,
        kv_encode.encode_all,
        sampling.draw_range,
        sampling.draw_parallel,
    ]
    with implementation.using("cpu"):
        warm_up(NEEDS, lambda *progress: None)
        before = [list(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]
        a_cache("nvfp4", HeadsShape(2, 64), 1)
        a_cache("k8v4", HeadsShape(3, 32), 600)
        an_attention_half(1)
        an_attention_half(300)
        a_layer(1, 8, 6)
        a_share_of_a_layer(3)
        a_layer(40, 300, 130)
        for rows in (1, 3):
            sample(
                torch.ones(rows, 1 << 16), [Cut(0.5, 3, 0.9, 0.1)] * rows, [-1] * rows, [7] * rows
            )
    after = [list(kernel.signatures) for kernel in kernels]  # type: ignore[attr-defined]
    assert after == before


def test_progress_names_each_step_once_and_ends_complete() -> None:
    told: list[tuple[int, int, str]] = []
    with implementation.using("cpu"):
        warm_up(NEEDS, lambda done, total, name, seconds: told.append((done, total, name)))
    total = told[0][1]
    assert [done for done, _, _ in told] == list(range(1, total + 1))
    assert {of for _, of, _ in told} == {total}
    assert len({name for _, _, name in told}) == total
    assert "experts bfloat16" in {name for _, _, name in told}


def test_what_any_model_needs_holds_what_each_needs(tmp_path: Path) -> None:
    """An image's kernels are compiled without a model."""

    def names(*needs: Needs) -> set[str]:
        return {step.name for need in needs for step in warm_up_steps(need)}

    save_family(tmp_path, "qwen3_moe")
    arch = load_architecture(tmp_path)
    with implementation.using("cpu"):
        for dtype in ("bfloat16", "float16", "float32"):
            assert names(kernel_needs(arch.held_in(dtype))) <= names(*EVERY_NEED)


def test_the_reference_has_nothing_to_compile() -> None:
    told: list[str] = []
    with implementation.using("reference"):
        warm_up(NEEDS, lambda done, total, name, seconds: told.append(name))
    assert told == []
