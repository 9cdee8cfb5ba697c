"""All layers in one compiled call, of addresses where each one's arguments lie frozen.

Neighbours: `stack` makes the addresses; `grouped_query_kernel`, `gate`, `copies` and `experts` have
the kernels, which are called by their slots.

Letters: T tokens, H hidden, L layers, P columns of addresses, E logical experts, S slots, K choices
a token.
"""

from __future__ import annotations

import numpy as np
from numba import types

from moe_kernels.cpu.attention_chunks import PARTIALS
from moe_kernels.cpu.copies import COPY_ARRAYS, place
from moe_kernels.cpu.experts import add_expert_rows, expert_kind
from moe_kernels.cpu.frozen import thawing
from moe_kernels.cpu.gate import gate_kind, route_rows
from moe_kernels.cpu.grouped_query_kernel import STEP_ARRAYS, attention_half, half_kind
from moe_kernels.cpu.jit import Array, compiled

STEP, HALF, GATE, COPIES, EXPERTS = range(5)
"""Columns of addresses; what is frozen at each but the first stays for the life of a stack."""
_step_at = thawing(lambda _: types.Tuple([STEP_ARRAYS, PARTIALS]))
_half_at = thawing(half_kind)
_gate_at = thawing(gate_kind)
_copies_at = thawing(lambda _: types.Tuple([COPY_ARRAYS, types.Array(types.int64, 1, "C")]))
_experts_at = thawing(expert_kind)


@compiled
def run_layers(
    x_TH: Array,
    addresses_LP: Array,
    like_half: Array,
    like_gate: Array,
    like_experts: Array,
    turn_L: Array,
    top_k: int,
    threads: int,
    out_TH: Array,
    chosen_LE: Array,
    served_LS: Array,
) -> int:
    """Fills the last three, `chosen_LE` from zero; returns the number of strangers."""
    num_tokens = x_TH.shape[0]
    middle_TH, normed_TH = np.empty_like(x_TH), np.empty_like(x_TH)
    ids_TK = np.empty((num_tokens, top_k), np.int64)
    slots_TK = np.empty_like(ids_TK)
    weights_TK = np.empty((num_tokens, top_k), np.float32)
    out_TH[:] = x_TH
    num_strangers = 0
    for layer in range(addresses_LP.shape[0]):
        at_P = addresses_LP[layer]
        step, partials = _step_at(at_P[STEP], at_P)
        attention_half(out_TH, _half_at(at_P[HALF], like_half), step, partials, middle_TH)
        gate = _gate_at(at_P[GATE], like_gate)
        route_rows(middle_TH, gate, normed_TH, ids_TK, weights_TK, threads)
        copies, sent_E = _copies_at(at_P[COPIES], at_P)
        num_strangers += place(ids_TK, copies, sent_E, turn_L[layer], slots_TK, chosen_LE[layer])
        experts = _experts_at(at_P[EXPERTS], like_experts)
        add_expert_rows(
            middle_TH, normed_TH, slots_TK, weights_TK, experts, out_TH, served_LS[layer], threads
        )
    return num_strangers
