"""Runs of layers that a rank which is alone can compute in one call.

A run is as many neighbouring layers as have grouped-query attention and experts.
Neighbours: `transformer` finds the runs, `moe_worker.expert.layer` computes one,
`moe_kernels.stack` is how.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from moe_kernels.grouped_query import GroupedQueryLayer
from moe_worker.model.attention import Attention
from moe_worker.model.grouped_query import GroupedQueryAttention
from moe_worker.model.second_half import DenseHalf, ExpertHalf


@dataclass(frozen=True, eq=False)
class LayerRun:
    first_layer: int
    first_ordinal: int
    """Of MoE layers."""
    layers: tuple[tuple[GroupedQueryLayer, ExpertHalf], ...]

    @property
    def end_layer(self) -> int:
        return self.first_layer + len(self.layers)


def runs_of(
    attentions: Sequence[Attention], halves: Sequence[ExpertHalf | DenseHalf]
) -> list[LayerRun]:
    """The runs of a model whose layers have these halves, in order."""
    runs: list[LayerRun] = []
    number = ordinal = 0
    both = zip(attentions, halves, strict=True)
    for is_run, members in groupby(
        [_whole(*pair) for pair in both], lambda whole: whole is not None
    ):
        layers = tuple(members)
        if is_run:
            runs.append(LayerRun(number, ordinal, tuple(whole for whole in layers if whole)))
        ordinal += sum(isinstance(half, ExpertHalf) for half in halves[number:][: len(layers)])
        number += len(layers)
    return runs


def _whole(
    attention: Attention, half: ExpertHalf | DenseHalf
) -> tuple[GroupedQueryLayer, ExpertHalf] | None:
    if isinstance(attention, GroupedQueryAttention) and isinstance(half, ExpertHalf):
        return attention.layer, half
    return None
