"""The expert layer of the model on this rank: the `moe` callable that the transformer calls.

route → look up slots → dispatch → experts → combine. It is called for every MoE layer in every
step, with no tokens too: an idle rank serves the others' rows.

Neighbours: `router`, `routing_table`, `dispatch`, `bank`, `load` are the parts; the engine begins
and ends each step here and replaces the table at a switch.

Letters: T tokens, N rows of a slice, P pairs, H hidden, E logical experts, K choices, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.grouped_gemm import expert_mlp
from moe_kernels.linear import linear
from moe_kernels.permute import sort_by_slot
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher, Slice
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.router import choose_experts
from moe_worker.expert.routing_table import RoutingTable
from moe_worker.model.spec import RouterSpec
from moe_worker.model.weights import RouterWeights


class ExpertLayers:
    def __init__(
        self,
        bank: ExpertBank,
        counters: LoadCounters,
        router: RouterSpec,
        act: Activation = SILU,
    ) -> None:
        self._bank, self._counters = bank, counters
        self._router, self._act = router, act
        # Never set back: epochs may be short, and the first points of a sequence are not yet even.
        self._sent_LE = torch.zeros(
            (bank.num_layers, counters.num_experts), dtype=torch.int64, device=bank.device
        )
        self._num_steps = 0
        self._table: RoutingTable | None = None
        self._dispatcher: Dispatcher | None = None
        self._tokens_R: Sequence[int] = ()

    def join(self, dispatcher: Dispatcher) -> None:
        """Use a new generation's buffers."""
        self._dispatcher = dispatcher

    def switch(self, table: RoutingTable) -> None:
        """Put a table in force for all layers, between two steps."""
        self._table = table

    def begin_step(self, tokens_R: Sequence[int]) -> None:
        """`tokens_R`: tokens of every rank in this step, from the agreement."""
        self._tokens_R = tokens_R
        self._counters.discard()

    def commit_step(self) -> None:
        """The step succeeded: its tokens count."""
        self._num_steps += 1
        self._sent_LE += self._counters.draft_routed_LE.to(self._bank.device)
        self._counters.commit()

    def __call__(self, layer: int, hidden_TH: Tensor, router: RouterWeights) -> Tensor:
        """Output of MoE layer `layer` (ordinal), float32 [T, H], for normed float32 input."""
        logits_TE = linear(hidden_TH, router.gate_EH)
        if router.logit_bias_E is not None:
            logits_TE += router.logit_bias_E.to(torch.float32)
        ids_TK, weights_TK = choose_experts(logits_TE, self._router, router.selection_bias_E)
        return self.run(layer, hidden_TH, ids_TK, weights_TK)

    def run(self, layer: int, hidden_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The same with the choices given (int64 logical ids; −1 and strangers add exactly 0)."""
        assert self._table is not None, "the engine joins and switches before the first step"
        assert self._dispatcher is not None, "the engine joins and switches before the first step"
        physical_TK, tokens_E = self._table.to_physical(
            layer, ids_TK, self._sent_LE[layer], self._num_steps
        )
        strangers = (ids_TK < -1) | (ids_TK >= self._table.num_experts)
        self._counters.count_routed(layer, tokens_E, int(strangers.sum()))
        batch = self._dispatcher.begin(hidden_TH, physical_TK, weights_TK, self._tokens_R)
        for piece in batch.slices():
            batch.combine(piece, self._experts(layer, piece))
        return batch.finish()

    def _experts(self, layer: int, piece: Slice) -> Tensor:
        """Every pair's row through its slot's expert, in the order of the slice's pairs."""
        bank = self._bank
        order_P, offsets = sort_by_slot(piece.slots_NK, bank.num_slots)
        self._counters.count_served(layer, offsets.diff())
        sorted_PH = expert_mlp(
            piece.rows_NH[order_P // self._router.top_k],
            offsets,
            bank.w13_LS2IH[layer],
            bank.w2_LSHI[layer],
            act=self._act,
            b13_S2I=bank.b13_LS2I[layer] if bank.has_bias else None,
            b2_SH=bank.b2_LSH[layer] if bank.has_bias else None,
        )
        return sorted_PH[torch.argsort(order_P)]
