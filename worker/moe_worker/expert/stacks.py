"""Whole layers as the kernels take them: what a rank that is alone computes in one call.

A stack is made of a run's weights, of the pages and of the table in force, and made anew when one
of them is another: at a switch, after the bank was resized, with another cache.
Neighbours: `layer` has the experts and the table, `model.layer_run` the rest of a layer,
`moe_kernels.stack` runs it.

Letters: L layers of the model, E logical experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_kernels.copies import Copies
from moe_kernels.experts import Experts
from moe_kernels.kv_pages import KvPages
from moe_kernels.stack import Stack, StackLayer
from moe_worker.model.layer_run import LayerRun


class Stacks:
    """The newest stack of each run."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[tuple[object, ...], Stack]] = {}

    def of(
        self,
        run: LayerRun,
        pages_L: tuple[KvPages, ...],
        copies: Sequence[Copies],
        sent: Tensor,
        experts: Sequence[Experts],
    ) -> Stack:
        """The last three: of the run's layers; `sent` int64 [layers, E], counted up in place."""
        parts = run, pages_L, *copies, sent.data_ptr(), *experts
        made, stack = self._made.get(run.first_layer, ((), None))
        if stack is None or not _same(made, parts):
            pages = pages_L[run.first_layer : run.end_layer]
            together = zip(run.layers, pages, copies, sent, experts, strict=True)
            stack = Stack(
                tuple(
                    StackLayer(
                        attention, pages, half.gate, copies, sent_E, experts, half.shared,
                        half.multiplier,
                    )
                    for (attention, half), pages, copies, sent_E, experts in together
                )
            )  # fmt: skip
            self._made[run.first_layer] = parts, stack
        return stack


def _same(made: Sequence[object], parts: Sequence[object]) -> bool:
    if len(made) != len(parts):
        return False
    return all(old is new or old == new for old, new in zip(made, parts, strict=True))
