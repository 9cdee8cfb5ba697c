"""Latent attention over pages: the numbers of keys and values built in full, in every format.

Letters: T tokens, N heads, C not rotated, R rotated, D latent, V value, L keys.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.kv_formats import KvFormat, KvFormatName, LatentShape
from moe_kernels.kv_pages import KvPages, allocate_pages, append_latent, read_latent
from moe_kernels.latent_attention import head_linear, latent_attention

pytestmark = pytest.mark.usefixtures("implementation")

N, C, R, D, V = 3, 24, 16, 64, 20
SCALE = 0.2
LENGTHS = [1, 63, 64, 150]
NUM_BLOCKS, BLOCK = 32, 16


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Sequences whose latents lie scattered in one cache whose other places are NaN."""

    def __init__(self, kv_format: KvFormatName = "fp32", dtype: torch.dtype = torch.float32):
        self.w_k = draw(N, C, D, seed=1).to(dtype) / 8
        self.w_v = draw(N, V, D, seed=2).to(dtype) / 8
        self.pages: KvPages = allocate_pages(
            KvFormat(kv_format), LatentShape(D, R), NUM_BLOCKS, BLOCK
        )
        for stored in self.pages.tensors:
            stored.fill_(torch.nan if stored.dtype.is_floating_point else 0x7F)
        free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        self.tables: list[list[int]] = []
        self.q: list[Tensor] = []
        for index, length in enumerate(LENGTHS):
            self.tables.append([free.pop() for _ in range(-(-length // BLOCK))])
            at = torch.arange(length)
            slots = torch.tensor(self.tables[-1])[at // BLOCK] * BLOCK + at % BLOCK
            latent, rope = draw(length, D, seed=10 + index), draw(length, R, seed=20 + index)
            append_latent(self.pages, latent, rope, slots)
            self.q.append(draw(length, N, C + R, seed=30 + index))

    def attend(self, pieces: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step with (sequence, start, tokens) pieces; the result of each piece."""
        rows = [AttentionRows(start, count, self.tables[seq]) for seq, start, count in pieces]
        q = torch.cat([self.q[seq][start : start + count] for seq, start, count in pieces])
        out = latent_attention(
            q[..., :C], q[..., C:], self.pages, plan_attention(rows, BLOCK),
            w_k_NCD=self.w_k, w_v_NVD=self.w_v, scale=SCALE,
        )  # fmt: skip
        return list(out.split([count for _, _, count in pieces]))

    def textbook(self, seq: int) -> Tensor:
        """Keys and values of every head built in full, in float64."""
        length = LENGTHS[seq]
        read = read_latent(self.pages, torch.tensor([self.tables[seq]]))
        latent_LD, rope_LR = (part[0, :length].double() for part in read)
        k_NLC = torch.einsum("ld,ncd->nlc", latent_LD, self.w_k.double())
        v_NLV = torch.einsum("ld,nvd->nlv", latent_LD, self.w_v.double())
        keys_NLX = torch.cat((k_NLC, rope_LR.expand(N, -1, -1)), dim=-1)
        scores = self.q[seq].double().transpose(0, 1) @ keys_NLX.transpose(1, 2) * SCALE
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v_NLV).transpose(0, 1)


WHOLE = [(seq, 0, length) for seq, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("kv_format", ["fp32", "bf16", "fp8", "nvfp4", "mxfp4"])
def test_it_is_attention_over_keys_and_values_built_in_full(kv_format: KvFormatName) -> None:
    case = Case(kv_format)
    for seq, out in enumerate(case.attend(WHOLE)):
        torch.testing.assert_close(out.double(), case.textbook(seq), rtol=1e-5, atol=1e-5)


def test_bfloat16_matrices_round_what_goes_into_them_and_no_more() -> None:
    case = Case(dtype=torch.bfloat16)
    for seq, out in enumerate(case.attend(WHOLE)):
        wanted = case.textbook(seq)
        assert float((out - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_know_its_company(dtype: torch.dtype) -> None:
    case = Case("nvfp4", dtype)
    whole = case.attend(WHOLE)
    for seq, length in enumerate(LENGTHS):
        for chunk in (1, 3, 16):
            pieces = [(seq, at, min(chunk, length - at)) for at in range(0, length, chunk)]
            parts = [case.attend([piece])[0] for piece in pieces]
            assert torch.equal(torch.cat(parts), whole[seq]), (seq, chunk)
    mixed = case.attend([(3, 149, 1), (1, 5, 30), (2, 63, 1)])
    for (seq, start, count), out in zip([(3, 149, 1), (1, 5, 30), (2, 63, 1)], mixed, strict=True):
        assert torch.equal(out, whole[seq][start : start + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_heads_product_does_not_know_its_neighbours(dtype: torch.dtype) -> None:
    w_NOI = draw(5, 40, 72, seed=1).to(dtype)
    x_TNI = draw(50, 5, 72, seed=2)
    whole = head_linear(x_TNI, w_NOI)
    torch.testing.assert_close(
        whole, torch.einsum("tni,noi->tno", x_TNI.to(dtype).float(), w_NOI.float())
    )
    for start, stop in ((0, 1), (7, 8), (3, 20), (49, 50), (0, 0)):
        assert torch.equal(head_linear(x_TNI[start:stop], w_NOI), whole[start:stop])
