"""Rows packed for ranks, unpacked for experts and added up, against naive loops over choices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_kernels import implementation
from moe_kernels.bins import BinLayout, Bins, ForeignSlot
from moe_kernels.dispatch import add_up, pack, unpack

pytestmark = pytest.mark.usefixtures("implementation")


@dataclass
class Case:
    """Tokens of one rank and where they go."""

    num_ranks: int
    num_slots: int
    dtype: torch.dtype
    x_tH: torch.Tensor
    physical_tK: torch.Tensor
    weights_tK: torch.Tensor

    @property
    def layout(self) -> BinLayout:
        return BinLayout(self.x_tH.shape[1], self.physical_tK.shape[1], self.dtype)

    @property
    def pairs(self) -> list[tuple[int, int, int, int]]:
        """(rank, token, choice, slot) of every choice that goes somewhere, in order."""
        every = [
            (physical // self.num_slots, token, choice, physical % self.num_slots)
            for token, row in enumerate(self.physical_tK.tolist())
            for choice, physical in enumerate(row)
        ]
        return [pair for pair in every if 0 <= pair[0] < self.num_ranks]

    def packed(self) -> tuple[Bins, list[int], list[int], list[int]]:
        """Bins in which rank r's is the last but r, what `pack` told, and which bin is whose."""
        bins = Bins.allocate(
            self.num_ranks + 1, len(self.x_tH) + 1, self.layout, torch.device("cpu")
        )
        bins.memory.fill_(0xEE)
        bin_R = [self.num_ranks - rank for rank in range(self.num_ranks)]
        rows_R, pairs_R = pack(bins, self.x_tH, self.physical_tK, self.num_slots, bin_R)
        return bins, rows_R, pairs_R, bin_R


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_ranks, num_slots = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_tokens, top_k = draw(st.sampled_from([0, 1, 2, 7, 33])), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    # −1, past the last rank, and in "all to one" cases only slots of one rank.
    low, high = draw(st.sampled_from([(-1, num_ranks * num_slots + 1), (0, num_slots)]))
    size = (num_tokens, top_k)
    return Case(
        num_ranks,
        num_slots,
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        torch.randn((num_tokens, draw(st.sampled_from([1, 4, 31]))), generator=generator),
        torch.randint(low, high, size, generator=generator),
        torch.randn(size, generator=generator),
    )


@given(cases())
def test_every_rank_gets_each_of_its_tokens_once(case: Case) -> None:
    bins, rows_R, pairs_R, bin_R = case.packed()
    stored_tH, layout = case.x_tH.to(case.dtype), case.layout
    num_tokens, top_k = case.physical_tK.shape
    for rank, number in enumerate(bin_R):
        mine = [pair for pair in case.pairs if pair[0] == rank]
        tokens = sorted({token for _, token, _, _ in mine})
        assert (rows_R[rank], pairs_R[rank]) == (len(tokens), len(mine))
        slots_tK = torch.full((num_tokens, top_k), -1, dtype=torch.int32)
        for _, token, choice, slot in mine:
            slots_tK[token, choice] = slot
        header = bins.memory[number, : num_tokens * top_k * 4]
        assert torch.equal(header.view(torch.int32).view(num_tokens, top_k), slots_tK)
        start, end = layout.header_bytes(num_tokens), layout.used_bytes(num_tokens, len(tokens))
        wanted = stored_tH[tokens].contiguous().view(-1).view(torch.uint8)
        assert torch.equal(bins.memory[number, start:end], wanted)
        assert (bins.memory[number, end:] == 0xEE).all(), "nothing past the last row"
    assert (bins.memory[0] == 0xEE).all(), "no bin of nobody's"


@given(cases(), st.randoms(use_true_random=False))
def test_rows_come_sorted_by_slot_and_say_whose_they_are(case: Case, random) -> None:  # type: ignore[no-untyped-def]
    bins, _, _, bin_R = case.packed()
    ranks = random.sample(range(case.num_ranks), random.randint(0, case.num_ranks))
    got = unpack(bins, [(bin_R[rank], len(case.x_tH)) for rank in ranks], case.num_slots)
    sent = [pair for rank in ranks for pair in case.pairs if pair[0] == rank]
    order = sorted(range(len(sent)), key=lambda number: sent[number][3])
    rounded_tH = case.x_tH.to(case.dtype).to(torch.float32)
    assert torch.equal(got.rows_PH, rounded_tH[[sent[number][1] for number in order]])
    assert got.offsets.tolist() == [
        sum(slot < bound for *_, slot in sent) for bound in range(case.num_slots + 1)
    ]
    assert [order[row] for row in got.row_P.tolist()] == list(range(len(sent)))
    assert list(got.pairs_Q) == [sum(pair[0] == rank for pair in sent) for rank in ranks]


@given(cases(), st.integers(0, 3))
def test_rows_are_added_in_order_of_choice_and_nowhere_adds_nothing(case: Case, own: int) -> None:
    own %= case.num_ranks
    (num_tokens, top_k), hidden = case.physical_tK.shape, case.x_tH.shape[1]
    y_PH = torch.randn((num_tokens * top_k, hidden), generator=torch.Generator().manual_seed(1))
    nowhere = torch.full((num_tokens, top_k), True)
    wanted_tH = torch.zeros_like(case.x_tH)
    for _, token, choice, _ in case.pairs:
        nowhere[token, choice] = False
        wanted_tH[token] += case.weights_tK[token, choice] * y_PH[token * top_k + choice]
    of = {
        rank: [token * top_k + choice for at, token, choice, _ in case.pairs if at == rank]
        for rank in range(case.num_ranks)
    }
    # Own rows lie in any order, the others' one rank after the other, the last rank first.
    own_row_P = torch.randperm(len(of[own]), generator=torch.Generator().manual_seed(2))
    own_PH = torch.empty((len(of[own]), hidden))
    own_PH[own_row_P] = y_PH[of[own]]
    back, first_R = [torch.full((1, hidden), torch.nan)], [0] * case.num_ranks
    for rank in reversed(range(case.num_ranks)):
        if rank != own:
            first_R[rank] = sum(len(rows) for rows in back)
            back.append(y_PH[of[rank]])
    out_tH = torch.full_like(case.x_tH, torch.nan)
    add_up(
        out_tH, case.physical_tK, torch.where(nowhere, torch.nan, case.weights_tK), case.num_slots,
        own, own_PH, own_row_P, torch.cat(back), first_R,
    )  # fmt: skip
    assert torch.equal(out_tH, wanted_tH)


def test_a_slot_past_the_last_is_refused() -> None:
    layout = BinLayout(4, 2, torch.bfloat16)
    bins = Bins.allocate(1, 3, layout, torch.device("cpu"))
    pack(bins, torch.ones(3, 4), torch.tensor([[0, -1], [4, 1], [2, 3]]), 5, [0])
    with pytest.raises(ForeignSlot, match="past the 4 here"):
        unpack(bins, [(0, 3)], 4)


def test_all_implementations_are_of_one_mind_about_numbers_that_are_not_finite() -> None:
    x_tH = torch.tensor([[torch.nan, torch.inf], [-torch.inf, -0.0]])
    layout = BinLayout(2, 1, torch.bfloat16)
    for name in implementation.available():
        with implementation.using(name):
            bins = Bins.allocate(1, 2, layout, torch.device("cpu"))
            pack(bins, x_tH, torch.tensor([[0], [0]]), 1, [0])
            rows_PH = unpack(bins, [(0, 2)], 1).rows_PH
            assert rows_PH[0].isnan().tolist() == [True, False]
            assert rows_PH[0, 1] == torch.inf
            assert rows_PH[1].tolist() == [-torch.inf, 0.0]
            assert rows_PH[1].signbit().all()
