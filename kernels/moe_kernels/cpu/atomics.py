"""Numbers that several threads change at once, and the ways to wait for such a change.

A number is an element of an int64 array. Changes are in one order for all threads, and who reads a
change sees all that its writer had written before.
Neighbours: `parts` counts with them, `team` wakes threads by them.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import ctypes
import platform

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from moe_kernels.cpu.jit import inner

_FIRST_LOOKS = 4096
"""About 100 µs, in which a waiting thread keeps its processor."""
_LOOKS_PER_TURN = 64
_NUMBER_BYTES = 8
_ORDER = "seq_cst"
_PAUSES = {"x86_64": ("llvm.x86.sse2.pause", ()), "aarch64": ("llvm.aarch64.hint", (1,))}
"""Tells the processor that this is waiting, so that its other thread gets on."""
_libc = ctypes.CDLL(None)
for _name in ("sched_yield", "sem_wait", "sem_post"):
    _address = ctypes.cast(getattr(_libc, _name), ctypes.c_void_p).value
    llvmlite.binding.add_symbol(f"moe_kernels.{_name}", _address)


def _changing(operation):
    """An intrinsic (numbers, index, operand) that changes a number and gives the one before."""

    @intrinsic
    def change(typing_context, numbers, index, operand):
        def generate(context, builder, signature, arguments):
            pointer = _pointer(context, builder, signature, arguments)
            return builder.atomic_rmw(operation, pointer, arguments[2], _ORDER)

        return types.int64(numbers, types.int64, types.int64), generate

    return change


fetch_add = _changing("add")
exchange = _changing("xchg")
"""Put the operand there."""


@intrinsic
def look(typing_context, numbers, index):
    """The number, as it is now."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return builder.load_atomic(pointer, _ORDER, _NUMBER_BYTES)

    return types.int64(numbers, types.int64), generate


@inner
def linger(looks: int) -> None:
    """Between this look at a number and the next: for long waits others get the processor."""
    if looks < _FIRST_LOOKS or looks % _LOOKS_PER_TURN:
        _pause()
    else:
        _give_way()


@intrinsic
def _pause(typing_context):
    """A moment of waiting, some ten nanoseconds."""

    def generate(context, builder, signature, arguments):
        name, given = _PAUSES.get(platform.machine(), (None, ()))
        if name is not None:
            i32 = ir.IntType(32)
            kind = ir.FunctionType(ir.VoidType(), [i32] * len(given))
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [i32(number) for number in given])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _give_way(typing_context):
    """Let another thread have this processor, if one wants it."""

    def generate(context, builder, signature, arguments):
        _call_libc(builder, "sched_yield", [], [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep_on(typing_context, semaphore):
    """Take one from the semaphore (sem_t) at this address; sleeps while it has none."""

    def generate(context, builder, signature, arguments):
        _call_libc(builder, "sem_wait", [ir.IntType(64)], arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def wake_one(typing_context, semaphore):
    """Give one to the semaphore."""

    def generate(context, builder, signature, arguments):
        _call_libc(builder, "sem_post", [ir.IntType(64)], arguments)
        return context.get_dummy_value()

    return types.void(types.int64), generate


def _call_libc(builder, name, kinds, arguments):
    kind = ir.FunctionType(ir.IntType(32), kinds)
    symbol = f"moe_kernels.{name}"
    builder.call(cgutils.get_or_insert_function(builder.module, kind, symbol), arguments)


def _pointer(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])
