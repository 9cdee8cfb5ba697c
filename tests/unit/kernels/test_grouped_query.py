"""The attention half of a layer in one call: the bits of its parts one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import implementation as switch
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.attention_step import AttentionStep
from moe_kernels.grouped_query import GroupedQueryLayer, composed, grouped_query
from moe_kernels.kv_formats import KV_FORMATS, HeadsShape, KvFormat, KvFormatName
from moe_kernels.kv_pages import KvPages, LayerScales, allocate_pages
from moe_kernels.norm_rope import rope_table

# A first run compiles all that is compared, which takes minutes on a busy machine.
pytestmark = [pytest.mark.usefixtures("implementation"), pytest.mark.timeout(1200)]

BLOCK, MAX_TOKENS = 16, 96


def make_layer(draw: st.DrawFn, dtype: torch.dtype) -> GroupedQueryLayer:
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 2), (1, 5), (4, 2)]))
    heads, dim, hidden = kv_heads * group, draw(st.sampled_from([32, 64])), 48
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def normal(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(like)

    whole, of_head = (heads * dim, kv_heads * dim), (dim, dim)
    norms = draw(st.sampled_from([None, whole, of_head]))
    with_bias = draw(st.booleans())
    rows = (heads + 2 * kv_heads) * dim
    return GroupedQueryLayer(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        eps=1e-5,
        norm_H=1 + normal(hidden),
        qkv_QH=4 * normal(rows, hidden),
        o_HQ=normal(hidden, heads * dim),
        qkv_bias_Q=normal(rows, like=torch.float32) if with_bias else None,
        o_bias_H=normal(hidden, like=torch.float32) if with_bias else None,
        q_norm=None if norms is None else 1 + normal(norms[0]),
        k_norm=None if norms is None else 1 + normal(norms[1]),
        clip=draw(st.sampled_from([None, 0.5])),
        scale=draw(st.sampled_from([None, 0.2])),
        window=draw(st.sampled_from([None, 5, 40])),
        sinks_N=torch.randn(heads, generator=generator) if draw(st.booleans()) else None,
        residual=draw(st.sampled_from([1.0, 0.22])),
    )


def make_pages(layer: GroupedQueryLayer, kv_format: KvFormat, with_scales: bool) -> KvPages:
    shape = HeadsShape(layer.num_kv_heads, layer.head_dim)
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(layer.num_kv_heads, layer.head_dim, generator=generator)
    scales = LayerScales(key_center_ND=vectors, key_channel_ND=vectors.abs() + 0.5)
    blocks = 4 * MAX_TOKENS // BLOCK
    return allocate_pages(kv_format, shape, blocks, BLOCK, scales=scales if with_scales else None)


def a_step(layer: GroupedQueryLayer, pieces: list[tuple[int, int, int]]) -> AttentionStep:
    """`pieces` are a sequence, the position of its first token and how many."""
    cos, sin = rope_table(MAX_TOKENS, 0.5 ** torch.arange(layer.head_dim // 2 - 4))
    per_sequence = MAX_TOKENS // BLOCK
    rows, positions, slots = [], [], []
    for seq, start, count in pieces:
        table = [seq + 4 * place for place in range(per_sequence)]
        rows.append(AttentionRows(start, count, table))
        positions += range(start, start + count)
        slots += [table[at // BLOCK] * BLOCK + at % BLOCK for at in range(start, start + count)]
    plan = plan_attention(rows, BLOCK)
    return AttentionStep(cos[positions], sin[positions], torch.tensor(slots), plan)


def hidden_states(pieces: list[tuple[int, int, int]]) -> Tensor:
    """A token's are the same in every step."""
    seeds = [1000 * seq + at for seq, start, n in pieces for at in range(start, start + n)]
    rows = [torch.randn(48, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows)


@given(data=st.data(), name=st.sampled_from(KV_FORMATS), dtype=st.sampled_from(["bfloat16"]))
@settings(max_examples=40, deadline=None)
def test_one_call_gives_the_bits_of_its_parts(
    data: st.DataObject, name: KvFormatName, dtype: str
) -> None:
    layer = make_layer(data.draw, getattr(torch, dtype))
    encoding = data.draw(st.sampled_from(["Standard", "FourOverSix"]))
    kv_format = KvFormat(name, encoding if name in ("nvfp4", "k8v4") else "Standard")
    with_scales = data.draw(st.booleans())
    pages, others = (make_pages(layer, kv_format, with_scales) for _ in range(2))
    lengths = data.draw(st.lists(st.integers(1, MAX_TOKENS - 1), min_size=1, max_size=4))
    threads = torch.get_num_threads()
    try:
        for pieces in (
            [(seq, 0, length) for seq, length in enumerate(lengths)],
            [(seq, length, 1) for seq, length in enumerate(lengths)],
        ):
            torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
            x_TH, step = hidden_states(pieces), a_step(layer, pieces)
            before = x_TH.clone()
            found = grouped_query(x_TH, layer, pages, step)
            assert torch.equal(found, composed(x_TH, layer, others, step))
            assert torch.equal(x_TH, before)
    finally:
        torch.set_num_threads(threads)
    for stored, other in zip(pages.tensors, others.tensors, strict=True):
        assert torch.equal(stored.view(torch.uint8), other.view(torch.uint8))


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_it_agrees_with_the_oracle(data: st.DataObject) -> None:
    layer = make_layer(data.draw, torch.bfloat16)
    pages, others = (make_pages(layer, KvFormat("fp32"), False) for _ in range(2))
    pieces = [(0, 0, 40), (1, 0, 3)]
    x_TH, step = hidden_states(pieces), a_step(layer, pieces)
    found = grouped_query(x_TH, layer, pages, step)
    with switch.using("reference"):
        expected = composed(x_TH, layer, others, step)
    # A number that is rounded to bfloat16 the other way is 2⁻⁸ of itself away.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)


@given(data=st.data(), name=st.sampled_from(["bf16", "nvfp4"]))
@settings(max_examples=20, deadline=None)
def test_a_token_is_bit_equal_alone_and_in_company(data: st.DataObject, name: KvFormatName) -> None:
    layer = make_layer(data.draw, torch.bfloat16)
    pages, others = (make_pages(layer, KvFormat(name), False) for _ in range(2))
    together = [(0, 0, 30), (1, 0, 17), (2, 0, 1)]
    whole = grouped_query(hidden_states(together), layer, pages, a_step(layer, together))
    cut = data.draw(st.integers(1, 29))
    alone = []
    for piece in ((0, 0, cut), (0, cut, 30 - cut), (1, 0, 17), (2, 0, 1)):
        x_TH = hidden_states([piece])
        alone.append(grouped_query(x_TH, layer, others, a_step(layer, [piece])))
    assert torch.equal(torch.cat(alone), whole)


@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_no_tokens_are_no_rows(data: st.DataObject) -> None:
    layer = make_layer(data.draw, torch.bfloat16)
    pages = make_pages(layer, KvFormat("bf16"), False)
    empty = AttentionStep(
        torch.empty(0, 4), torch.empty(0, 4), torch.empty(0, dtype=torch.int64),
        plan_attention([], BLOCK),
    )  # fmt: skip
    assert grouped_query(torch.empty(0, 48), layer, pages, empty).shape == (0, 48)


@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_a_probe_sees_what_is_stored(data: st.DataObject) -> None:
    layer = make_layer(data.draw, torch.bfloat16)
    pages = make_pages(layer, KvFormat("nvfp4"), False)
    pages.probe.wanted = True
    grouped_query(hidden_states([(0, 0, 3)]), layer, pages, a_step(layer, [(0, 0, 3)]))
    assert pages.probe.relative_error is not None


@given(data=st.data())
@settings(max_examples=3, deadline=None)
def test_a_place_outside_the_pages_is_an_error(data: st.DataObject) -> None:
    layer = make_layer(data.draw, torch.bfloat16)
    pages = make_pages(layer, KvFormat("bf16"), False)
    step = a_step(layer, [(0, 0, 1)])
    outside = replace(step, slots_T=torch.tensor([pages.num_blocks * BLOCK]))
    with pytest.raises(IndexError):
        grouped_query(hidden_states([(0, 0, 1)]), layer, pages, outside)
