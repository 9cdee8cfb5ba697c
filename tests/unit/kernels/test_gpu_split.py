"""Attention of a GPU cut along the keys: what is cut, and that cutting changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_kernels import implementation as switch
from moe_kernels.attention_plan import AttentionRows, plan_attention
from moe_kernels.gpu import attention_work as cutting
from moe_kernels.gpu.attention_work import END, FIRST, PART, attention_work
from moe_kernels.kv_formats import HeadsShape, KvFormat
from moe_kernels.kv_pages import allocate_pages, append
from moe_kernels.paged_attention import paged_attention
from tests.support import gpu_carry

CPU = torch.device("cpu")


def test_one_long_sequence_is_cut_at_the_same_positions_for_every_step() -> None:
    plan = plan_attention([AttentionRows(1099, 1, range(69)), AttentionRows(5, 1, [0])], 16)
    work = attention_work(plan, 1, 1, CPU)
    assert work.units[:, [FIRST, END, PART]].tolist() == [
        [0, 1, 0], [1, 2, 1], [2, 3, 2], [0, 1, -1],
    ]  # fmt: skip
    assert work.num_parts == 3
    assert work.merges[:, [PART, END]].tolist() == [[0, 3]]


def test_a_step_with_many_tiles_is_not_cut() -> None:
    rows = [AttentionRows(1099, 1, range(69))] * cutting.ENOUGH_PROGRAMS
    work = attention_work(plan_attention(rows, 16), 1, 1, CPU)
    assert work.num_parts == 0
    assert work.units[:, [FIRST, END, PART]].unique(dim=0).tolist() == [[0, 3, -1]]


@pytest.mark.gpu
@pytest.mark.skipif("gpu" not in switch.available(), reason="neither a GPU nor interpreted")
def test_cutting_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    if not switch.is_interpreted():
        gpu_carry.carry_operands()
    generator = torch.Generator().manual_seed(0)
    pages = allocate_pages(KvFormat("nvfp4"), HeadsShape(1, 32), 69, 16)
    k, v = torch.randn(2, 1100, 1, 32, generator=generator).unbind()
    q = torch.randn(1, 2, 32, generator=generator)
    with switch.using("reference"):
        append(pages, k, v, torch.arange(1100))
        expected = paged_attention(
            q, pages, plan_attention([AttentionRows(1099, 1, range(69))], 16)
        )
    found = []
    for enough in (cutting.ENOUGH_PROGRAMS, 0):
        monkeypatch.setattr(cutting, "ENOUGH_PROGRAMS", enough)
        plan = plan_attention([AttentionRows(1099, 1, range(69))], 16)
        with switch.using("gpu"), np.errstate(all="ignore"):
            found.append(paged_attention(q, pages, plan))
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-4)
