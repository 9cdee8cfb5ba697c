"""The threads that help with a kernel: this process's team.

A kernel that may use several threads is called by `together`: the caller begins at once, members of
the team come along when they get to run, and the call is over when the caller is through and nobody
is inside any more. What is to do they divide by `parts`. Nobody waits for a member that has not
come, only for a part that one has taken: where other work has the processors, the caller does most
of it alone.

Members look for work for a short while after they had some, then they sleep. One call at a time has
the team; another one at the same time is done by its caller alone, and so is a call after a fork,
where there are no members.
Neighbours: `parts` divides the work; `atomics` are the means.
"""

# mypy: ignore-errors

from __future__ import annotations

import atexit
import ctypes
import os
import threading

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from moe_kernels.cpu.apart import Slot, load_slot, unowned
from moe_kernels.cpu.atomics import exchange, fetch_add, linger, look, sleep_on, wake_one
from moe_kernels.cpu.jit import compiled, inner

_LINE = 8
"""Numbers in a line of the cache."""
_ROUND, _INSIDE, _BUSY, _ASLEEP, _ENDING, _CALL = range(0, 6 * _LINE, _LINE)
_FUNCTION, _GIVEN, _WANTED, _SEMAPHORE = range(_CALL, _CALL + 4)
"""The round is odd while there is work. How many members are inside, whether a call has the team,
how many members sleep or are about to, whether all shall end. Of the call: code, address of its
arguments, how many members it wants; and the semaphore that members sleep on."""
_NUMBERS = 6 * _LINE
_PATIENCE = 1 << 17
"""Looks for work before a member sleeps, some milliseconds: a virtual processor that was let go of
takes longer to come back than a model's step lasts."""
MOST_THREADS = len(os.sched_getaffinity(0))
_STATE_SYMBOL = "moe_kernels.team_state"
_I64, _POINTER = ir.IntType(64), ir.IntType(8).as_pointer()

_state = np.zeros(_NUMBERS, np.int64)
_semaphore = np.zeros(16, np.int64)
"""A sem_t, with room to spare."""
_state[_SEMAPHORE] = _semaphore.ctypes.data
llvmlite.binding.add_symbol(_STATE_SYMBOL, _state.ctypes.data)
_libc = ctypes.CDLL(None, use_errno=True)
_members: list[threading.Thread] = []
_growing = threading.Lock()


def num_threads() -> int:
    """Threads that a kernel called from this thread may use: torch's number, as far as there are
    processors. To be asked before each call."""
    wanted = min(torch.get_num_threads(), MOST_THREADS)
    if wanted > 1 + len(_members):
        _grow(wanted - 1)
    return wanted


def num_asleep() -> int:
    """Members that wait for a call to wake them; for tests."""
    asleep: int = int(_state[_ASLEEP])
    return asleep


def _grow(num_members: int) -> None:
    """Have at least so many members."""
    with _growing:
        _RUN.fill()
        while len(_members) < num_members:
            index = len(_members)
            name = f"kernels-{index + 1}"
            member = threading.Thread(target=serve, args=(index,), name=name, daemon=True)
            member.start()
            _members.append(member)


@atexit.register
def _end() -> None:
    """Members run compiled code, which goes away with the interpreter."""
    _state[_ENDING] = 1
    for _ in _members:
        _libc.sem_post(ctypes.c_void_p(_semaphore.ctypes.data))
    for member in _members:
        member.join()
    _members.clear()


def _begin() -> None:
    """Nobody is here, as at the start and in a child process."""
    global _growing
    _members.clear()
    _growing = threading.Lock()
    _state[[_INSIDE, _BUSY, _ASLEEP, _ENDING]] = 0
    _state[_ROUND] += _state[_ROUND] % 2
    failed = _libc.sem_init(ctypes.c_void_p(_semaphore.ctypes.data), 0, 0)
    assert not failed, "a semaphore within this process"


_begin()
os.register_at_fork(after_in_child=_begin)


@intrinsic
def together(typing_context, function, threads, *given):
    """Call `function(*given)`, which is compiled and returns nothing, with up to so many threads.

    Each thread calls it with the same arguments. More than one is what `num_threads` said.
    """
    if not isinstance(function, types.Dispatcher):
        return None
    called = function.get_call_type(typing_context, given, {})

    def generate(context, builder, signature, arguments):
        compiled_function = function.dispatcher.get_compile_result(called)
        context.active_code_library.add_linking_library(compiled_function.library)
        values = cgutils.unpack_tuple(builder, arguments[2], len(given))
        pairs = zip(given, called.args, values, strict=True)
        values = [context.cast(builder, value, kind, wanted) for kind, wanted, value in pairs]
        values = [
            unowned(context, builder, kind, value)
            for kind, value in zip(called.args, values, strict=True)
        ]
        packed = ir.LiteralStructType([value.type for value in values])
        room = cgutils.alloca_once(builder, packed)
        for place, value in enumerate(values):
            builder.store(value, cgutils.gep_inbounds(builder, room, 0, place))
        entry = _entry(context, builder.module, compiled_function.fndesc, called, packed)
        address = builder.bitcast(room, _POINTER)
        is_alone = builder.icmp_signed("<=", arguments[1], arguments[1].type(1))
        with builder.if_else(is_alone) as (alone, shared):
            with alone:
                builder.call(entry, [address])
            with shared:
                run = load_slot(builder, _RUN.symbol)
                kind = ir.FunctionType(ir.VoidType(), [_I64] * 3)
                wanted = context.cast(builder, arguments[1], signature.args[1], types.int64)
                numbers = [builder.ptrtoint(each, _I64) for each in (entry, address)]
                builder.call(builder.bitcast(run, kind.as_pointer()), [*numbers, wanted])
        return context.get_dummy_value()

    return types.void(function, threads, types.Tuple(given)), generate


def _entry(context, module, described, called, packed):
    """Code that takes the address of the arguments."""
    kind = ir.FunctionType(ir.VoidType(), [_POINTER])
    entry = ir.Function(
        module, kind, name=module.get_unique_name(f"{described.mangled_name}.entry")
    )
    entry.linkage = "internal"
    builder = ir.IRBuilder(entry.append_basic_block())
    room = builder.bitcast(entry.args[0], packed.as_pointer())
    values = [
        builder.load(cgutils.gep_inbounds(builder, room, 0, place))
        for place in range(len(packed.elements))
    ]
    context.call_internal_no_propagate(builder, described, called, values)
    builder.ret_void()
    return entry


@intrinsic
def _team_state(typing_context):
    kind = types.Array(types.int64, 1, "C")

    def generate(context, builder, signature, arguments):
        numbers = _external(builder.module)
        array = context.make_array(kind)(context, builder)
        size = context.get_constant(types.intp, _NUMBERS)
        stride = context.get_constant(types.intp, 8)
        populate_array(
            array, builder.bitcast(numbers, _I64.as_pointer()), [size], [stride], stride, None
        )
        return array._getvalue()

    return kind(), generate


def _external(module):
    known = module.globals.get(_STATE_SYMBOL)
    return known or cgutils.add_global_variable(module, ir.ArrayType(_I64, _NUMBERS), _STATE_SYMBOL)


@intrinsic
def _call(typing_context, function, given):
    """The code at this address, of the arguments at that one."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_POINTER])
        code = builder.inttoptr(arguments[0], kind.as_pointer())
        builder.call(code, [builder.inttoptr(arguments[1], _POINTER)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _run(function, given, threads):
    state = _team_state()
    if exchange(state, np.int64(_BUSY), np.int64(1)) != 0:
        _call(function, given)
        return
    state[_FUNCTION], state[_GIVEN], state[_WANTED] = function, given, threads - 1
    fetch_add(state, np.int64(_ROUND), np.int64(1))
    for _ in range(exchange(state, np.int64(_ASLEEP), np.int64(0))):
        wake_one(state[_SEMAPHORE])
    _call(function, given)
    # Whoever comes from here on finds an even round and leaves.
    fetch_add(state, np.int64(_ROUND), np.int64(1))
    looks = 0
    while look(state, np.int64(_INSIDE)) > 0:
        looks += 1
        linger(looks)
    exchange(state, np.int64(_BUSY), np.int64(0))


_RUN = Slot("team_run", _run, [types.int64] * 3)


@compiled
def serve(index):
    """The life of a member; returns when all shall end."""
    state = _team_state()
    done = np.int64(0)
    while True:
        now = _next_round(state, done)
        if look(state, np.int64(_ENDING)) != 0:
            return
        fetch_add(state, np.int64(_INSIDE), np.int64(1))
        # Only now that the caller waits for us: the round may be over.
        now = look(state, np.int64(_ROUND))
        if now % 2 == 1 and index < state[_WANTED]:
            _call(state[_FUNCTION], state[_GIVEN])
        fetch_add(state, np.int64(_INSIDE), np.int64(-1))
        done = now


@inner
def _next_round(state, done):
    """Wait for a round with work that is not done, or the end."""
    looks = 0
    while True:
        now = look(state, np.int64(_ROUND))
        if (now % 2 == 1 and now != done) or look(state, np.int64(_ENDING)) != 0:
            return now
        looks += 1
        if looks < _PATIENCE:
            linger(looks)
            continue
        fetch_add(state, np.int64(_ASLEEP), np.int64(1))
        # Looked once more: a caller that came in between saw nobody asleep.
        now = look(state, np.int64(_ROUND))
        if (now % 2 == 1 and now != done) or look(state, np.int64(_ENDING)) != 0:
            return now
        sleep_on(state[_SEMAPHORE])
        looks = 0
