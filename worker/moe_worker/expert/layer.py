"""The expert half of the layers on this rank: the `moe` callable that the transformer calls.

route → look up slots → dispatch → experts → combine. It is called for every MoE layer in every
step, with no tokens too: an idle rank serves the others' rows. Runs of whole layers, or the whole
model, go in fewer calls with the same numbers: a rank that is alone has nothing to dispatch.

Neighbours: `gate`, `experts`, `stack` and `forward` of `moe_kernels`, `routing_table`, `dispatch`,
`exchanged_layers`, `bank`, `load` are the parts; the engine begins and ends each step here and
replaces the table at a switch.

Letters: T tokens, P rows of a piece, H hidden, E logical experts, K choices, S slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_kernels.activation import SILU, Activation
from moe_kernels.attention_step import AttentionStep
from moe_kernels.bins import Unpacked
from moe_kernels.expert_parallel import add_routed
from moe_kernels.experts import Experts, add_experts
from moe_kernels.forward import Ends, forward
from moe_kernels.gate import route
from moe_kernels.kv_pages import KvPages
from moe_kernels.mlp import Mlp
from moe_kernels.stack import Counts, Stack, StackLayer, run_stack
from moe_kernels.step_tokens import StepTokens
from moe_worker.expert.bank import ExpertBank
from moe_worker.expert.dispatch import Dispatcher
from moe_worker.expert.exchanged_layers import run_exchanged
from moe_worker.expert.load import LoadCounters
from moe_worker.expert.routing_table import RoutingTable, Turns
from moe_worker.model.layer_run import LayerRun
from moe_worker.model.second_half import ExpertHalf

_Given = tuple[Tensor | None, Tensor, Tensor, Tensor]
"""What is added to, rows, slots and weights."""


class _MadeStack(NamedTuple):
    pages_L: tuple[KvPages, ...]
    num_resizes: int
    stack: Stack
    turns: Turns


class ExpertLayers:
    def __init__(self, bank: ExpertBank, counters: LoadCounters, act: Activation = SILU) -> None:
        self._bank, self._counters, self._act = bank, counters, act
        self._experts_L: list[Experts | None] = [None] * bank.num_layers
        # Never set back: epochs may be short, and the first points of a sequence are not yet even.
        self._routed_LE = torch.from_numpy(counters.routed_LE)
        self._sent_LE = self._routed_LE.to(bank.device)
        """Where the bank is; on the CPU it is the counters' own memory."""
        self._num_steps = 0
        self._made: dict[int, _MadeStack] = {}
        """By the run's first layer. Like `_experts_L` they hold on to the bank's tensors: a rank
        that joins others must not keep those of before."""
        self._table: RoutingTable | None = None
        self._dispatcher: Dispatcher | None = None
        self._tokens_R: Sequence[int] = ()

    def join(self, dispatcher: Dispatcher) -> None:
        """Use a new generation's buffers."""
        self._dispatcher = dispatcher
        self._made.clear()
        self._experts_L = [None] * self._bank.num_layers

    def switch(self, table: RoutingTable) -> None:
        """Put a table in force for all layers, between two steps."""
        self._table = table
        self._made.clear()

    def begin_step(self, tokens_R: Sequence[int]) -> None:
        """`tokens_R`: tokens of every rank in this step, from the agreement."""
        self._tokens_R = tokens_R
        self._counters.discard()

    def commit_step(self) -> None:
        """The step succeeded: its tokens count."""
        self._num_steps += 1
        self._counters.commit()
        if self._sent_LE is not self._routed_LE:
            self._sent_LE.copy_(self._routed_LE)

    def __call__(self, layer: int, x_TH: Tensor, half: ExpertHalf) -> Tensor:
        """x and the output of MoE layer `layer` (ordinal) added up, float32 [T, H]."""
        normed_TH, ids_TK, weights_TK = route(x_TH, half.gate)
        dispatcher = self._joined
        if dispatcher.exchange.size == 1:
            return self._alone(
                dispatcher, layer, x_TH, normed_TH, ids_TK, weights_TK, half.shared, half.multiplier
            )
        out_TH = self._together(dispatcher, layer, normed_TH, ids_TK, weights_TK)
        return add_routed(x_TH, out_TH, normed_TH, half.shared, half.multiplier)

    def whole(
        self, run: LayerRun, pages_L: tuple[KvPages, ...], x_TH: Tensor, step: AttentionStep
    ) -> Tensor | None:
        """All layers of a run, with the same numbers: in one call where this rank is alone, in
        three a layer among others. None where the step is too large for that."""
        dispatcher, alone = self._joined, self._at_once(x_TH.shape[0])
        if not alone and not dispatcher.one_piece(self._tokens_R):
            return None
        made = self._stack(run, pages_L)
        turn_L = made.turns.of(self._num_steps)
        if alone:
            x_TH, counts = run_stack(x_TH, made.stack, step, turn_L)
            self._count(run, x_TH.shape[0], counts)
        else:
            x_TH, counts = run_exchanged(x_TH, made.stack, step, turn_L, dispatcher, self._tokens_R)
            self._counters.count_run(run.first_ordinal, counts)
        return x_TH

    def forward(
        self, run: LayerRun, pages_L: tuple[KvPages, ...], tokens: StepTokens, ends: Ends
    ) -> Tensor | None:
        """The same with the model's ends, of a run that is all layers: the step's logits."""
        if not self._at_once(tokens.num_tokens):
            return None
        made = self._stack(run, pages_L)
        logits_BV, counts = forward(tokens, ends, made.stack, made.turns.of(self._num_steps))
        self._count(run, tokens.num_tokens, counts)
        return logits_BV

    def _at_once(self, num_tokens: int) -> bool:
        """Raises ValueError unless so many tokens were agreed."""
        dispatcher = self._joined
        if dispatcher.exchange.size > 1 or num_tokens > dispatcher.shape.tokens_per_round:
            return False
        dispatcher.check_tokens(num_tokens, self._tokens_R)
        return True

    def _count(self, run: LayerRun, num_tokens: int, counts: Counts) -> None:
        dispatcher = self._joined
        num_rows = len(run.layers) * num_tokens
        dispatcher.observer.sent("self", num_rows * dispatcher.row_bytes)
        self._counters.count_run(run.first_ordinal, counts)

    def _stack(self, run: LayerRun, pages_L: tuple[KvPages, ...]) -> _MadeStack:
        """Made anew after a switch, for other pages, and when the bank was resized."""
        made, num_resizes = self._made.get(run.first_layer), self._bank.num_resizes
        if made is None or made.pages_L is not pages_L or made.num_resizes != num_resizes:
            stack = Stack(tuple(self._layers(run, pages_L)))
            turns = Turns(run.first_ordinal, len(run.layers))
            made = self._made[run.first_layer] = _MadeStack(pages_L, num_resizes, stack, turns)
        return made

    def _layers(self, run: LayerRun, pages_L: tuple[KvPages, ...]) -> Iterator[StackLayer]:
        for place, (attention, half) in enumerate(run.layers):
            ordinal = run.first_ordinal + place
            yield StackLayer(
                attention,
                pages_L[run.first_layer + place],
                half.gate,
                self._in_force.copies_L[ordinal],
                self._sent_LE[ordinal],
                self._experts(ordinal),
                half.shared,
                half.multiplier,
            )

    def run(self, layer: int, normed_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """The routed experts' sum alone, for choices given (int64 logical ids; −1 and strangers
        add exactly 0)."""
        dispatcher = self._joined
        if dispatcher.exchange.size == 1:
            return self._alone(dispatcher, layer, None, normed_TH, ids_TK, weights_TK)
        return self._together(dispatcher, layer, normed_TH, ids_TK, weights_TK)

    @property
    def _joined(self) -> Dispatcher:
        assert self._dispatcher is not None, "the engine joins and switches before the first step"
        return self._dispatcher

    @property
    def _in_force(self) -> RoutingTable:
        assert self._table is not None, "the engine joins and switches before the first step"
        return self._table

    def _places(self, layer: int, ids_TK: Tensor) -> Tensor:
        """Physical experts of the choices, which count as routed."""
        physical_TK, tokens_E, num_strangers = self._in_force.to_physical(
            layer, ids_TK, self._sent_LE[layer], self._num_steps
        )
        self._counters.count_routed(layer, tokens_E.cpu().numpy(), num_strangers)
        return physical_TK

    def _alone(
        self,
        dispatcher: Dispatcher,
        layer: int,
        onto_TH: Tensor | None,
        normed_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
        shared: Mlp | None = None,
        multiplier: float = 1.0,
    ) -> Tensor:
        """Physical experts of the only rank are its slots. In rounds, as several ranks would, for
        buffers of bounded size."""
        dispatcher.check(normed_TH, ids_TK, self._tokens_R)
        slots_TK, shape = self._places(layer, ids_TK), dispatcher.shape
        dispatcher.observer.sent("self", normed_TH.shape[0] * dispatcher.row_bytes)
        given = onto_TH, normed_TH, slots_TK, weights_TK
        outputs: list[Tensor] = []
        for onto_tH, normed_tH, slots_tK, weights_tK in _rounds(given, shape.tokens_per_round):
            out_tH, served_S = add_experts(
                onto_tH,
                normed_tH,
                slots_tK,
                weights_tK,
                self._experts(layer),
                shared=shared,
                multiplier=multiplier,
            )
            self._counters.count_served(layer, served_S.cpu().numpy())
            outputs.append(out_tH)
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _together(
        self,
        dispatcher: Dispatcher,
        layer: int,
        normed_TH: Tensor,
        ids_TK: Tensor,
        weights_TK: Tensor,
    ) -> Tensor:
        physical_TK = self._places(layer, ids_TK)
        batch = dispatcher.begin(normed_TH, physical_TK, weights_TK, self._tokens_R)
        for piece in batch.pieces():
            batch.combine(piece, self._serve(layer, piece))
        return batch.finish()

    def _serve(self, layer: int, piece: Unpacked) -> Tensor:
        """Every row of a piece through its slot's expert."""
        experts = self._experts(layer)
        self._counters.count_served(layer, piece.offsets.diff().cpu().numpy())
        return experts.run(piece.rows_PH, piece.offsets)

    def _experts(self, layer: int) -> Experts:
        """The bank's tensors of a layer, which are others after the bank was resized."""
        bank, experts = self._bank, self._experts_L[layer]
        if experts is None or experts.w13_S2IH is not bank.w13_LS2IH[layer]:
            experts = self._experts_L[layer] = Experts(
                bank.w13_LS2IH[layer],
                bank.w2_LSHI[layer],
                self._act,
                bank.b13_LS2I[layer] if bank.has_bias else None,
                bank.b2_LSH[layer] if bank.has_bias else None,
            )
        return experts


def _rounds(given: _Given, size: int) -> list[_Given]:
    """The same rows in pieces of at most `size`; one piece where there are none."""
    onto_TH, normed_TH, slots_TK, weights_TK = given
    num_tokens = normed_TH.shape[0]
    if num_tokens <= size:
        return [given]
    spans = [slice(start, start + size) for start in range(0, num_tokens, size)]
    return [
        (None if onto_TH is None else onto_TH[t], normed_TH[t], slots_TK[t], weights_TK[t])
        for t in spans
    ]
