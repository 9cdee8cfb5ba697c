"""Functions that are compiled once, apart from the kernels that call them.

numba puts the code of everything that a kernel reaches into that kernel's library and optimises it
again, once for each function on the way. For a large function that is most
of a cold start. One that is `apart` is a library by itself; callers hold nothing but the name of a
slot and call the address that they find in it. Slots exist from the import on, so that a caller can
be loaded from the cache at any time; they are to be filled before the first call.
Neighbours: `product.multiply` is such a function, `arrays` fills its slots.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.extending import intrinsic

from moe_kernels.cpu.jit import CACHE_FOLDER

_ADDRESS = ir.IntType(8).as_pointer()
_filling = threading.Lock()


class Slot:
    """Where callers find the code of `function` for arguments of these numba types.

    It returns nothing; its arrays are C-contiguous, its whole numbers int64. The types of its
    arrays tell it from others of the same name.
    """

    def __init__(self, name: str, function: Callable[..., None], kinds: Sequence[Any]) -> None:
        self._function, self._kinds = function, kinds
        self._address = ctypes.c_void_p(None)
        self._code: Any = None
        self.symbol = _symbol(name, kinds)
        llvmlite.binding.add_symbol(self.symbol, ctypes.addressof(self._address))

    def fill(self) -> None:
        """Compile the function, or load it from the cache; nothing to do the second time."""
        if self._code is not None:
            return
        with _filling:
            if self._code is None:
                code = numba.cfunc(
                    types.void(*self._kinds),
                    cache=CACHE_FOLDER is not None,
                    error_model="numpy",
                    boundscheck=False,
                )(self._function)
                self._address.value = code.address
                self._code = code


@intrinsic(prefer_literal=True)
def call_apart(typing_context: Any, name: Any, *kinds: Any) -> Any:
    """Call the function of this literal name in the slot for the types of the arrays."""
    if not isinstance(name, types.StringLiteral):
        return None  # numba's second try, after an error of the first
    symbol = _symbol(name.literal_value, kinds)
    if any(array.layout != "C" for kind in kinds for array in _arrays(kind)):
        raise TypingError(f"{symbol}: its arrays must be C-contiguous")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, passed = [], []
        together = cgutils.unpack_tuple(builder, arguments[1], len(kinds))
        for kind, value in zip(signature.args[1], together, strict=True):
            whole = isinstance(kind, types.Integer | types.IntegerLiteral)
            passed.append(types.int64 if whole else kind)
            values.append(context.cast(builder, value, kind, passed[-1]))
        packer = context.get_arg_packer(passed)
        function = ir.FunctionType(ir.VoidType(), packer.argument_types)
        code = builder.bitcast(load_slot(builder, symbol), function.as_pointer())
        builder.call(code, packer.as_arguments(builder, values))
        return context.get_dummy_value()

    return types.void(name, types.Tuple(kinds)), generate


def load_slot(builder: Any, symbol: str) -> Any:
    """For code generators: the address that the slot of this symbol holds."""
    slot = builder.module.globals.get(symbol)
    if slot is None:
        slot = cgutils.add_global_variable(builder.module, _ADDRESS, symbol)
    return builder.load(slot)


def unowned(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    """For code generators: the value with arrays that nobody counts, because their owners live
    longer than whoever gets it."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        array.parent = cgutils.get_null_value(array.parent.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for place, member in enumerate(kind):
            inner = unowned(context, builder, member, builder.extract_value(value, place))
            value = builder.insert_value(value, inner, place)
    return value


def _symbol(name: str, kinds: Sequence[Any]) -> str:
    elements = [f"{array.dtype}{array.ndim}" for kind in kinds for array in _arrays(kind)]
    return ".".join(["moe_kernels", name, *elements])


def _arrays(kind: Any) -> list[Any]:
    if isinstance(kind, types.BaseTuple):
        return [array for member in kind for array in _arrays(member)]
    return [kind] if isinstance(kind, types.Array) else []
