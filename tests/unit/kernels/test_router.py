"""The router's choices and weights: a plain loop over one token is the oracle."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels.reference import router as reference
from moe_kernels.router import ExpertGroups, RouterSpec, UnfitRouter, choose_experts

pytestmark = pytest.mark.usefixtures("implementation")

LOGITS = st.integers(-240, 240).map(lambda eighths: eighths / 8)
"""Equal or well apart: an exponential's last bits must not decide."""


@st.composite
def routers(draw: st.DrawFn) -> RouterSpec:
    num_groups, group_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    keep = draw(st.integers(1, num_groups))
    groups = ExpertGroups(num_groups, keep, draw(st.sampled_from(["max", "top2sum"])))
    return RouterSpec(
        num_experts=num_groups * group_size,
        top_k=draw(st.integers(1, keep * group_size)),
        score=draw(st.sampled_from(["softmax", "sigmoid", "softmax_topk"])),
        bias_for_selection=draw(st.booleans()),
        groups=draw(st.sampled_from([None, groups])),
        renorm=draw(st.booleans()),
        renorm_epsilon=draw(st.sampled_from([0.0, 1e-20])),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )


def drawn(
    data: st.DataObject, spec: RouterSpec, values: st.SearchStrategy[float] = LOGITS
) -> tuple[Tensor, Tensor | None]:
    num_tokens = data.draw(st.integers(1, 5))
    row = st.lists(values, min_size=spec.num_experts, max_size=spec.num_experts)
    logits = torch.tensor(data.draw(st.lists(row, min_size=num_tokens, max_size=num_tokens)))
    if not spec.bias_for_selection:
        return logits, None
    biases = st.sampled_from([-0.5, 0.0, 0.25])
    size = spec.num_experts
    return logits, torch.tensor(data.draw(st.lists(biases, min_size=size, max_size=size)))


def naive(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> tuple[list[int], list[float]]:
    """One token, expert by expert."""
    if spec.score == "softmax":
        scores = torch.softmax(logits, 0).tolist()
    elif spec.score == "sigmoid":
        scores = (1.0 / (1.0 + torch.exp(-logits))).tolist()
    else:
        scores = logits.tolist()
    ranking = scores if bias is None else (torch.tensor(scores) + bias).tolist()
    allowed = set(range(len(scores)))
    if spec.groups is not None:
        size = len(scores) // spec.groups.num
        members = [range(g * size, (g + 1) * size) for g in range(spec.groups.num)]
        count = 1 if spec.groups.reduce == "max" else 2
        values = [
            torch.tensor(sorted((ranking[e] for e in group), reverse=True)[:count]).sum().item()
            for group in members
        ]
        best = sorted(range(len(values)), key=lambda g: (-values[g], g))[: spec.groups.keep]
        allowed = {e for g in best for e in members[g]}
    ids = sorted(allowed, key=lambda e: (-ranking[e], e))[: spec.top_k]
    weights = [scores[e] for e in ids]
    if spec.score == "softmax_topk":
        weights = torch.softmax(torch.tensor(weights, dtype=torch.float64), 0).tolist()
    elif spec.renorm:
        weights = [w / (sum(weights) + spec.renorm_epsilon) for w in weights]
    return ids, [w * spec.scale for w in weights]


@settings(deadline=None, max_examples=60)
@given(routers(), st.data())
def test_every_router_is_the_plain_loop(spec: RouterSpec, data: st.DataObject) -> None:
    logits, bias = drawn(data, spec)
    ids, weights = choose_experts(logits, spec, bias)
    assert ids.dtype == torch.int64
    assert weights.dtype == torch.float32
    for row in range(len(logits)):
        wanted_ids, wanted = naive(logits[row], spec, bias)
        assert ids[row].tolist() == wanted_ids
        assert weights[row].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-30)


@settings(deadline=None, max_examples=60)
@given(routers(), st.data())
def test_a_token_chooses_the_same_alone_and_among_others(
    spec: RouterSpec, data: st.DataObject
) -> None:
    logits, bias = drawn(data, spec)
    ids, weights = choose_experts(logits, spec, bias)
    for row in range(len(logits)):
        alone_ids, alone_weights = choose_experts(logits[row : row + 1], spec, bias)
        assert torch.equal(alone_ids[0], ids[row])
        assert torch.equal(alone_weights[0], weights[row])


@settings(deadline=None, max_examples=60)
@given(routers(), st.data())
def test_what_is_no_number_stays_with_its_token(spec: RouterSpec, data: st.DataObject) -> None:
    odd = st.one_of(LOGITS, st.sampled_from([math.nan, math.inf, -math.inf]))
    logits, bias = drawn(data, spec, odd)
    ids, weights = choose_experts(logits, spec, bias)
    again_ids, again_weights = choose_experts(logits.clone(), spec, bias)
    assert torch.equal(ids, again_ids)
    assert torch.equal(weights.nan_to_num(7.0), again_weights.nan_to_num(7.0))
    for row in range(len(logits)):
        chosen = ids[row].tolist()
        assert len(set(chosen)) == spec.top_k
        assert all(0 <= expert < spec.num_experts for expert in chosen)
        if logits[row].isfinite().all():
            wanted_ids, wanted = naive(logits[row], spec, bias)
            assert chosen == wanted_ids
            assert weights[row].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-30)
        elif spec.score == "softmax" and bool(logits[row].isnan().any()):
            assert bool(weights[row].isnan().all())


@settings(deadline=None, max_examples=60)
@given(routers(), st.data())
def test_all_choose_as_the_reference_does(spec: RouterSpec, data: st.DataObject) -> None:
    """Also among logits that are no numbers."""
    odd = st.one_of(LOGITS, st.sampled_from([math.nan, math.inf, -math.inf]))
    logits, bias = drawn(data, spec, odd)
    ids, weights = choose_experts(logits, spec, bias)
    wanted_ids, wanted = reference.choose_experts(logits, spec, bias)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-30, equal_nan=True)


def test_equal_scores_go_to_the_lowest_ids() -> None:
    ids, weights = choose_experts(torch.zeros((3, 8)), RouterSpec(8, 3))
    assert ids.tolist() == [[0, 1, 2]] * 3
    assert torch.equal(weights, torch.full((3, 3), 0.125) / 0.375)


def test_equal_groups_go_to_the_first_ones() -> None:
    spec = RouterSpec(8, 2, score="sigmoid", groups=ExpertGroups(4, 2, "top2sum"))
    ids, _ = choose_experts(torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 1.0]]), spec)
    assert ids.tolist() == [[0, 1]]


def test_the_bias_decides_the_choice_and_not_the_weight() -> None:
    spec = RouterSpec(3, 1, score="sigmoid", bias_for_selection=True, renorm=False)
    logits = torch.tensor([[1.0, 0.0, 0.5]])
    ids, weights = choose_experts(logits, spec, torch.tensor([0.0, 1.0, 0.0]))
    assert (ids.tolist(), weights.tolist()) == ([[1]], [[0.5]])


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_a_row_is_bit_equal_in_a_wide_batch(seed: int, row: int, top_k: int) -> None:
    logits = torch.randn((67, 12), generator=torch.Generator().manual_seed(seed))
    for score in ("softmax", "sigmoid", "softmax_topk"):
        spec = RouterSpec(12, top_k, score=score)  # type: ignore[arg-type]
        ids, weights = choose_experts(logits, spec)
        alone = choose_experts(logits[row : row + 1], spec)
        assert torch.equal(alone[0], ids[row : row + 1])
        assert torch.equal(alone[1], weights[row : row + 1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_k": 0}, "num_experts_per_tok is 0"),
        ({"top_k": 9}, "num_experts_per_tok is 9: must be 1 to the 8 experts"),
        ({"groups": ExpertGroups(3, 1)}, "n_group 3 does not divide the 8 experts"),
        ({"groups": ExpertGroups(0, 0)}, "n_group 0 does not divide"),
        ({"groups": ExpertGroups(4, 5)}, "topk_group 5: must be 1 to n_group 4"),
        ({"groups": ExpertGroups(4, 1), "top_k": 3}, "3 of the 2 experts that topk_group 1"),
    ],
)
def test_a_router_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UnfitRouter, match=message):
        dataclasses.replace(RouterSpec(8, 2), **fields)


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 2**31))
def test_c07_groups_of_one_expert_are_no_groups(num_tokens: int, seed: int) -> None:
    """Two of every group cannot be asked for where a group has one."""
    logits = torch.randn(num_tokens, 8, generator=torch.Generator().manual_seed(seed))
    plain = RouterSpec(8, 2, score="sigmoid")
    for reduce in ("max", "top2sum"):
        grouped = dataclasses.replace(plain, groups=ExpertGroups(8, 8, reduce))
        for got, expected in zip(
            choose_experts(logits, grouped), choose_experts(logits, plain), strict=True
        ):
            assert torch.equal(got, expected)
        ids, _ = choose_experts(logits, dataclasses.replace(grouped, top_k=8))
        assert (ids.sort(dim=1).values == torch.arange(8)).all(), "an expert chosen twice"


def test_c07_more_than_there_is_to_choose_from_is_refused_naming_both() -> None:
    with pytest.raises(UnfitRouter, match="is 4: must be 1 to the 3 experts"):
        RouterSpec(3, 4)
    with pytest.raises(UnfitRouter, match="n_group 4 does not divide the 10 experts"):
        RouterSpec(10, 2, groups=ExpertGroups(4, 2))
    assert RouterSpec(10, 2).groups is None


def test_what_does_not_fit_the_router_is_refused() -> None:
    with pytest.raises(ValueError, match="7 logits a token for 8 experts"):
        choose_experts(torch.zeros((1, 7)), RouterSpec(8, 2))
    with pytest.raises(ValueError, match="selection bias"):
        choose_experts(torch.zeros((1, 8)), RouterSpec(8, 2), torch.zeros(8))
    with pytest.raises(ValueError, match="selection bias"):
        choose_experts(torch.zeros((1, 8)), RouterSpec(8, 2, bias_for_selection=True))


def test_no_tokens() -> None:
    spec = RouterSpec(8, 2, groups=ExpertGroups(4, 2, "top2sum"))
    ids, weights = choose_experts(torch.zeros((0, 8)), spec)
    assert ids.shape == weights.shape == (0, 2)
