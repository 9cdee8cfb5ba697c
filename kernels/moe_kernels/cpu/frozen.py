"""Arguments of kernels, kept in memory in the form in which kernels hold them.

Every array that Python hands to a kernel is taken apart again at every call, and between two
kernels that have just read all of a layer's weights Python finds nothing of its own in the caches.
So what does not change between calls is handed over once: `freeze` writes a tuple's numbers and
array headers (not what the arrays hold) into a block of memory, and a kernel that gets the block's
address reads the tuple back by what `thawing` made.
The block owns nothing: whoever keeps a `Frozen` keeps the arrays with it.
Neighbours: `stack` and `forward` run all layers by such blocks; `apart` calls the layers' kernels.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from moe_kernels.cpu.apart import unowned
from moe_kernels.cpu.jit import Array, compiled


class Frozen:
    """A tuple of arrays and numbers as kernels read it."""

    def __init__(self, value: tuple[Any, ...]) -> None:
        self._memory, self._value = freeze(value), value

    @property
    def address(self) -> int:
        address: int = self._memory.ctypes.data
        return address


@compiled
def freeze(value: tuple[Any, ...]) -> Array:
    """The block. A kernel that makes one for another keeps the value, too, until that is done."""
    memory = np.empty(_size_of(value), np.uint8)
    _store(value, memory)
    return memory


def thawing(kind_of: Callable[[Any], Any]) -> Any:
    """For kernels: `(address, like)` gives the tuple that was frozen at the address.

    Its numba type is `kind_of` of the type of the elements of the array `like`.
    """

    @intrinsic
    def thaw(typing_context: Any, address: Any, like: Any) -> Any:
        kind = kind_of(like.dtype)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = context.get_value_type(kind).as_pointer()
            value = builder.load(builder.inttoptr(arguments[0], pointer))
            return impl_ret_borrowed(context, builder, kind, value)

        return kind(types.int64, like), generate

    return thaw


@intrinsic
def _size_of(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.get_constant(
            types.int64, context.get_abi_sizeof(context.get_value_type(value))
        )

    return types.int64(value), generate


@intrinsic
def _store(typing_context: Any, value: Any, memory: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(memory)(context, builder, arguments[1])
        kept = unowned(context, builder, value, arguments[0])
        builder.store(kept, builder.bitcast(array.data, kept.type.as_pointer()))
        return context.get_dummy_value()

    return types.void(value, memory), generate
