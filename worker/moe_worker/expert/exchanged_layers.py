"""Whole layers one after the other, whose experts are on several ranks, for steps in one piece.

Neighbours: `layer` calls it and keeps what it counted; `dispatch` moves the rows between the parts
of `moe_kernels.expert_parallel`; larger steps, and layers of other kinds, go by `RoutedBatch`.

Letters: T tokens, H hidden, L layers, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from moe_kernels.attention_step import AttentionStep
from moe_kernels.expert_parallel import combine_rows, dispatch_rows, serve_rows
from moe_kernels.stack import Counts, IntArray, Stack
from moe_worker.expert.dispatch import Dispatcher


def run_exchanged(
    x_TH: Tensor,
    stack: Stack,
    step: AttentionStep,
    turn_L: IntArray,
    dispatcher: Dispatcher,
    tokens_R: Sequence[int],
) -> tuple[Tensor, Counts]:
    """Float32 `x_TH` through all layers of the stack, and what they counted here; rows come and go
    twice a layer. The step must be `Dispatcher.one_piece`.

    Raises:
        ValueError: other tokens than were agreed.
        ExchangeFailed: a rank failed.
    """
    dispatcher.check_tokens(x_TH.shape[0], tokens_R)
    own, slots_per_rank = dispatcher.exchange.rank, dispatcher.shape.slots_per_rank
    ranks = [rank for rank in (own, *dispatcher.peers) if tokens_R[rank]]
    sources = [(rank, tokens_R[rank]) for rank in ranks]
    chosen, served, num_strangers = [], [], 0
    for number, turn in enumerate(turn_L.tolist()):
        sent = dispatch_rows(
            x_TH, stack, number, step, turn, dispatcher.bins, slots_per_rank, dispatcher.bin_R
        )
        dispatcher.observer.sent("self", sent.rows_R[own] * dispatcher.row_bytes)
        dispatcher.wait("dispatch", dispatcher.send_rows(tokens_R, sent.rows_R))
        done = serve_rows(dispatcher.bins, sources, stack, number)
        rows = dict(zip(ranks, torch.split(done.y_NH, done.pairs_Q), strict=True))
        own_NH = rows.pop(own, dispatcher.back_NH[:0])
        returning = [(rank, rows_NH) for rank, rows_NH in rows.items() if len(rows_NH)]
        first_R = dispatcher.return_rows(returning, sent.pairs_R)
        x_TH = combine_rows(
            sent, slots_per_rank, own, own_NH, dispatcher.back_NH, first_R, stack, number
        )
        chosen.append(sent.chosen_E)
        served.append(done.served_S)
        num_strangers += sent.num_strangers
    return x_TH, Counts(np.stack(chosen), np.stack(served), num_strangers)
