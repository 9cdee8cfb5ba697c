"""The ends of a model in one call each: bit for bit the single operations of the same kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels.head import Embedding, Head, embed, head_logits
from moe_kernels.linear import linear
from moe_kernels.norm_rope import rms_norm

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 20),
    st.data(),
    st.sampled_from([(1.0, 1.0), (12.0, 8.0)]),
)
def test_in_one_call_the_same_bits(
    dtype: torch.dtype, num_tokens: int, data: st.DataObject, factors: tuple[float, float]
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    rows_VH = torch.randn(50, 37, generator=generator).to(dtype)
    ids_T = torch.randint(0, 50, (num_tokens,), generator=generator)
    x_TH = embed(ids_T, Embedding(rows_VH, factors[0]))
    assert torch.equal(x_TH, rows_VH[ids_T].float() * factors[0])
    numbers = st.integers(0, num_tokens - 1)
    chosen = data.draw(st.lists(numbers, max_size=12)) if num_tokens else []
    rows_B = torch.tensor(chosen, dtype=torch.int64)
    norm_H = torch.randn(37, generator=generator).to(dtype)
    logits_BV = head_logits(x_TH, rows_B, Head(norm_H, 1e-6, rows_VH, factors[1]))
    wanted = linear(rms_norm(x_TH[rows_B], norm_H, 1e-6), rows_VH) / factors[1]
    assert torch.equal(logits_BV, wanted)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("num_rows", [1, 20])
def test_the_number_of_threads_does_not_matter(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(1)
    rows_VH = torch.randn(1001, 512, generator=generator).bfloat16()
    head, x_TH = Head(rows_VH[0], 1e-6, rows_VH), torch.randn(30, 512, generator=generator)
    rows_B = torch.arange(num_rows)
    with_two = head_logits(x_TH, rows_B, head)
    torch.set_num_threads(1)
    assert torch.equal(head_logits(x_TH, rows_B, head), with_two)


@pytest.mark.parametrize("wrong", [-8, 7])
def test_a_number_that_names_no_row_is_refused(wrong: int) -> None:
    rows_VH = torch.ones(7, 16)
    with pytest.raises(IndexError):
        embed(torch.tensor([0, wrong]), Embedding(rows_VH))
    with pytest.raises(IndexError):
        head_logits(rows_VH, torch.tensor([wrong]), Head(rows_VH[0], 1e-6, rows_VH))
