"""Experts of a rank over rows sorted by slot: numbers, empty groups, and bit-equal rows."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.mxfp4 import dequantize_mxfp4, quantize_mxfp4
from tests.support.examples import examples

pytestmark = pytest.mark.usefixtures("implementation")

HIDDEN, INTERMEDIATE = 40, 28


def weights(slots: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(slots)
    w13 = torch.randn(slots, 2 * INTERMEDIATE, HIDDEN, generator=generator)
    w2 = torch.randn(slots, HIDDEN, INTERMEDIATE, generator=generator)
    return w13.to(dtype), w2.to(dtype)


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])


def dense(rows: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """One expert in float64, rounding where `expert_mlp` promises to."""
    gate, up = (rows.to(w13.dtype).double() @ w13.double().t()).chunk(2, dim=-1)
    inner = (torch.nn.functional.silu(gate) * up).float().to(w2.dtype)
    return inner.double() @ w2.double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "counts",
    [[512, 1, 0, 3], [516, 0, 0, 0], [0, 0, 0, 5], [0, 0, 0, 0], [16, 17, 15, 1], [1]],
    ids=str,
)
def test_c05_every_row_is_its_own_experts(counts: list[int], dtype: torch.dtype) -> None:
    w13, w2 = weights(len(counts), dtype)
    rows = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(1))
    out = expert_mlp(rows, offsets_of(counts), w13, w2)
    assert out.shape == rows.shape
    assert out.dtype == torch.float32
    start = 0
    for slot, count in enumerate(counts):
        mine = slice(start, start + count)
        expected = dense(rows[mine], w13[slot], w2[slot])
        # In bfloat16 a sum's last bit may round the inner value to its other neighbour.
        tolerance = (
            1e-3
            if dtype == torch.float32
            else 0.02 * max(1.0, float(expected.abs().max()) if count else 1.0)
        )
        torch.testing.assert_close(out[mine].double(), expected, rtol=0, atol=tolerance)
        assert bool((out[mine].abs().sum(dim=1) > 0).all())
        start += count


@pytest.mark.parametrize("counts", [[512, 1, 0, 3], [516, 0, 0, 0]], ids=str)
def test_c05_no_token_is_lost_with_weights_of_four_bits(counts: list[int]) -> None:
    """Weights as an MXFP4 checkpoint holds them, widened at load."""
    generator = torch.Generator().manual_seed(6)
    w13, w2 = (
        dequantize_mxfp4(*quantize_mxfp4(torch.randn(shape, generator=generator)))
        for shape in [(4, 64, 96), (4, 96, 32)]
    )
    rows = torch.randn(516, 96, generator=generator)
    out = expert_mlp(rows, offsets_of(counts), w13.bfloat16(), w2.bfloat16())
    bounds = offsets_of(counts).tolist()
    for slot, (start, end) in enumerate(itertools.pairwise(bounds)):
        expected = dense(rows[start:end], w13[slot].bfloat16(), w2[slot].bfloat16())
        scale = float(expected.abs().max()) if end > start else 1.0
        torch.testing.assert_close(out[start:end].double(), expected, rtol=0, atol=0.02 * scale)
    assert bool((out.abs().sum(dim=1) > 0).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_bit_equal_alone_crowded_and_in_another_slot(dtype: torch.dtype) -> None:
    w13, w2 = weights(1, dtype)
    rows = torch.randn(37, HIDDEN, generator=torch.Generator().manual_seed(2))
    crowded = expert_mlp(rows, offsets_of([37]), w13, w2)
    three_copies = w13.expand(3, -1, -1), w2.expand(3, -1, -1)
    spread = expert_mlp(rows, offsets_of([5, 20, 12]), *three_copies)
    assert torch.equal(spread, crowded)
    for row in (0, 15, 16, 36):
        alone = expert_mlp(rows[row : row + 1], offsets_of([1]), w13, w2)
        assert torch.equal(alone[0], crowded[row])


def test_slots_at_odd_addresses_are_equal() -> None:
    """41 · 3 floats a matrix: no slot but the first is aligned in memory."""
    generator = torch.Generator().manual_seed(4)
    one13, one2 = (
        torch.randn(2 * 3, 41, generator=generator),
        torch.randn(41, 3, generator=generator),
    )
    w13, w2 = one13.repeat(4, 1, 1), one2.repeat(4, 1, 1)
    row = torch.randn(1, 41, generator=generator)
    results = [
        expert_mlp(row, offsets_of([int(slot == s) for s in range(4)]), w13, w2)
        for slot in range(4)
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_rows_past_the_last_offset_are_zero() -> None:
    w13, w2 = weights(2)
    out = expert_mlp(torch.full((5, HIDDEN), torch.nan), offsets_of([0, 0]), w13, w2)
    assert torch.equal(out, torch.zeros(5, HIDDEN))


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[int], list[int], torch.dtype]:
    """Rows of each slot in one batch, and which of all rows come again in another."""
    counts = draw(st.lists(st.integers(0, 20), min_size=1, max_size=6))
    total = sum(counts)
    again = st.lists(st.integers(0, total - 1), max_size=20) if total else st.just([])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    return counts, sorted(draw(again)), dtype


@settings(max_examples=examples(40))
@given(crowds())
def test_any_crowd_the_same_bits(case: tuple[list[int], list[int], torch.dtype]) -> None:
    counts, again, dtype = case
    w13, w2 = weights(len(counts), dtype)
    rows = torch.randn(sum(counts), HIDDEN, generator=torch.Generator().manual_seed(3))
    slot_of = [slot for slot, count in enumerate(counts) for _ in range(count)]
    fewer = [sum(slot_of[row] == slot for row in again) for slot in range(len(counts))]
    whole = expert_mlp(rows, offsets_of(counts), w13, w2)
    assert torch.equal(expert_mlp(rows[again], offsets_of(fewer), w13, w2), whole[again])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(bad: float, dtype: torch.dtype) -> None:
    w13, w2 = weights(2, dtype)
    rows = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(5))
    clean = expert_mlp(rows, offsets_of([4, 5]), w13, w2)
    rows[6, 11] = bad
    out = expert_mlp(rows, offsets_of([4, 5]), w13, w2)
    others = [row for row in range(9) if row != 6]
    assert torch.equal(out[others], clean[others])
    assert not bool(out[6].isfinite().any())


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_matter(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    w13 = torch.randn(3, 2 * 100, 96, generator=generator).to(dtype)
    w2 = torch.randn(3, 96, 100, generator=generator).to(dtype)
    biases = {"b13_S2I": w13[:, :, 0], "b2_SH": w2[:, :, 0]}
    rows = torch.randn(60, 96, generator=generator)
    with_two = expert_mlp(rows, offsets_of([1, 0, 55]), w13, w2, **biases)
    torch.set_num_threads(1)
    assert torch.equal(expert_mlp(rows, offsets_of([1, 0, 55]), w13, w2, **biases), with_two)
    assert torch.equal(with_two[56:], torch.zeros(4, 96))
