"""All layers in one compiled call, of addresses where each one's arguments lie frozen.

Neighbours: `stack` makes the addresses; `grouped_query_kernel`, `gate`, `copies` and `experts` have
the kernels, which are called by their slots.

Letters: T tokens, H hidden, L layers, P columns of addresses, E logical experts, S slots, K choices
a token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types

from moe_kernels.cpu.attention_chunks import PARTIALS
from moe_kernels.cpu.copies import COPY_ARRAYS, place
from moe_kernels.cpu.experts import NUM_PHASES as EXPERT_PHASES
from moe_kernels.cpu.experts import expert_kind, expert_phases, expert_room
from moe_kernels.cpu.frozen import thawing
from moe_kernels.cpu.gate import NUM_PHASES as ROUTE_PHASES
from moe_kernels.cpu.gate import gate_kind, route_floats, route_phases
from moe_kernels.cpu.grouped_query_kernel import NUM_PHASES as HALF_PHASES
from moe_kernels.cpu.grouped_query_kernel import (
    STEP_ARRAYS,
    half_floats,
    half_kind,
    half_phases,
)
from moe_kernels.cpu.jit import Array, Index, compiled, inner
from moe_kernels.cpu.parts import meet, new_board, take, take_next
from moe_kernels.cpu.team import together

STEP, HALF, GATE, COPIES, EXPERTS = range(5)
"""Columns of addresses; what is frozen at each but the first stays for the life of a stack."""
_NUM_PHASES = HALF_PHASES + ROUTE_PHASES + 1 + EXPERT_PHASES
"""Of a layer; copies are chosen in one between."""
step_at = thawing(lambda _: types.Tuple([STEP_ARRAYS, PARTIALS]))
half_at = thawing(half_kind)
gate_at = thawing(gate_kind)
copies_at = thawing(lambda _: types.Tuple([COPY_ARRAYS, types.Array(types.int64, 1, "C")]))
experts_at = thawing(expert_kind)


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
    num_tokens, hidden = x_TH.shape
    board = new_board(addresses_LP.shape[0] * _NUM_PHASES)
    num_floats, num_numbers = _rooms(
        num_tokens, addresses_LP, like_half, like_gate, like_experts, top_k, served_LS.shape[1]
    )
    between = _Between(
        np.empty((num_tokens, hidden), np.float32),
        np.empty((num_tokens, hidden), np.float32),
        np.empty((num_tokens, top_k), np.int64),
        np.empty((num_tokens, top_k), np.float32),
        np.empty((num_tokens, top_k), np.int64),
        np.empty(num_floats, np.float32),
        np.empty(num_numbers, np.int64),
    )
    strangers_L = np.empty(addresses_LP.shape[0], np.int64)
    together(
        _walk, threads, board, x_TH, addresses_LP, like_half, like_gate, like_experts, turn_L,
        threads, between, out_TH, chosen_LE, served_LS, strangers_L,
    )  # fmt: skip
    return int(strangers_L.sum())


class _Between(NamedTuple):
    """What phases leave to others."""

    middle_TH: Array
    normed_TH: Array
    ids_TK: Array
    weights_TK: Array
    slots_TK: Array
    room: Array
    """For the rows of one half of a layer, float32."""
    numbers_room: Array
    """And for their places, int64."""


@inner
def _walk(
    board: Array, x_TH: Array, addresses_LP: Array, like_half: Array, like_gate: Array,
    like_experts: Array, turn_L: Array, threads: int, between: _Between, out_TH: Array,
    chosen_LE: Array, served_LS: Array, strangers_L: Array,
) -> None:  # fmt: skip
    """What each thread does, see `parts`."""
    middle_TH, normed_TH, ids_TK, weights_TK, slots_TK, room, numbers_room = between
    phase = np.int64(0)
    for layer in range(addresses_LP.shape[0]):
        at_P = addresses_LP[layer]
        source_TH = out_TH if layer > 0 else x_TH
        step, partials = step_at(at_P[STEP], at_P)
        half = half_at(at_P[HALF], like_half)
        half_phases(board, phase, source_TH, half, step, partials, room, middle_TH)
        phase += HALF_PHASES
        gate = gate_at(at_P[GATE], like_gate)
        route_phases(board, phase, middle_TH, gate, room, normed_TH, ids_TK, weights_TK, threads)
        phase += ROUTE_PHASES
        if take(board, phase) == 0:
            copies, sent_E = copies_at(at_P[COPIES], at_P)
            strangers_L[layer] = place(
                ids_TK, copies, sent_E, turn_L[layer], slots_TK, chosen_LE[layer]
            )
            take_next(board, phase)
        meet(board, phase, 1)
        phase += 1
        experts = experts_at(at_P[EXPERTS], like_experts)
        expert_phases(
            board, phase, middle_TH, normed_TH, slots_TK, weights_TK, experts, room, numbers_room,
            out_TH, served_LS[layer], threads,
        )  # fmt: skip
        phase += EXPERT_PHASES


@inner
def _rooms(
    num_tokens: int, addresses_LP: Array, like_half: Array, like_gate: Array, like_experts: Array,
    top_k: int, num_slots: int,
) -> tuple[Index, Index]:  # fmt: skip
    """Float32 and int64 that the largest half of a layer needs."""
    num_floats: Index = 0
    num_numbers: Index = 0
    for layer in range(addresses_LP.shape[0]):
        at_P = addresses_LP[layer]
        half, gate = half_at(at_P[HALF], like_half), gate_at(at_P[GATE], like_gate)
        experts = experts_at(at_P[EXPERTS], like_experts)
        of_experts, numbers = expert_room(num_tokens, top_k, experts, num_slots)
        of_half, of_gate = half_floats(num_tokens, half.layer), route_floats(num_tokens, gate)
        num_floats = max(num_floats, of_half, of_gate, of_experts)
        num_numbers = max(num_numbers, numbers)
    return num_floats, num_numbers
