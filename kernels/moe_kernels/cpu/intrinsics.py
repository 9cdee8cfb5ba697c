"""What the vectoriser cannot be trusted with, as LLVM vector operations named for no processor.

`dot_rows` is the inner loop of every matrix product here: one weight row against 1 to MOST_TOKENS
tokens. A weight is read and widened once and used for all tokens; each token has LANES sums, lane j
adding the products k ≡ j (mod LANES) in order with a fused multiply-add, and at the end the lanes
are added as a tree: halves, quarters, eighths, … Products past the last whole group of LANES are
added up one by one and come last. That order never depends on how many tokens there are, so a
token's bits do not either. On AVX2 a group is two registers, six tokens fill twelve of the sixteen;
with AVX-512 or NEON the same program gives the same numbers.

Stored numbers are float32 arrays, uint16 arrays that hold bfloat16, or int16 arrays that hold
float16 (`arrays` makes them); the array's type selects the code.
All arrays are C-contiguous, indices are not checked.
Neighbours: `product` calls them; `lanes` is the same idea for attention.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
MOST_TOKENS = 6

_I16, _I32, _I64 = (ir.IntType(bits) for bits in (16, 32, 64))
_F32, _HALF = ir.FloatType(), ir.HalfType()


@intrinsic(prefer_literal=True)
def dot_rows(
    typing_context: Any,
    count: Any,
    weights_RK: Any,
    row: Any,
    inputs_TK: Any,
    first: Any,
    outputs_TC: Any,
    column: Any,
) -> Any:
    """outputs[first + t, column] = weights[row] · inputs[first + t] for t < count, a literal.

    `inputs_TK` and `outputs_TC` are float32.
    """
    tokens = range(count.literal_value)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, weights, row, inputs, first, outputs, column = (
            context.cast(builder, value, kind, types.int64)
            if isinstance(kind, types.Integer | types.IntegerLiteral)
            else value
            for value, kind in zip(arguments, signature.args, strict=True)
        )
        weights = context.make_array(signature.args[1])(context, builder, weights)
        inputs = context.make_array(signature.args[3])(context, builder, inputs)
        outputs = context.make_array(signature.args[5])(context, builder, outputs)
        stored = signature.args[1].dtype
        num_k = cgutils.unpack_tuple(builder, inputs.shape, 2)[1]
        num_columns = cgutils.unpack_tuple(builder, outputs.shape, 2)[1]
        weight_row = builder.gep(weights.data, [builder.mul(row, num_k)])
        token_rows = [
            builder.gep(inputs.data, [builder.mul(builder.add(first, _I64(t)), num_k)])
            for t in tokens
        ]
        lanes = ir.VectorType(_F32, LANES)
        sums = [cgutils.alloca_once_value(builder, _zero(lanes)) for _ in tokens]
        # The slot of a sum lies in the function's entry; it is emptied at every call.
        for total in sums:
            builder.store(_zero(lanes), total)
        whole = builder.and_(num_k, _I64(-LANES))
        _add_products(builder, stored, weight_row, token_rows, sums, (_I64(0), whole, LANES))
        rest = [cgutils.alloca_once_value(builder, _zero(_F32)) for _ in tokens]
        for total in rest:
            builder.store(_zero(_F32), total)
        _add_products(builder, stored, weight_row, token_rows, rest, (whole, num_k, 1))
        for t in tokens:
            total = builder.fadd(_tree(builder, builder.load(sums[t])), builder.load(rest[t]))
            place = builder.mul(builder.add(first, _I64(t)), num_columns)
            builder.store(total, builder.gep(outputs.data, [builder.add(place, column)]))
        return context.get_dummy_value()

    arguments = (count, weights_RK, row, inputs_TK, first, outputs_TC, column)
    return types.void(*arguments), generate


@intrinsic
def widened(typing_context: Any, stored: Any) -> Any:
    """The stored number, an element of such an array, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _widen(builder, signature.args[0], arguments[0], 1)

    return types.float32(stored), generate


@intrinsic
def rounded(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32 rounded to what the array `like` stores, to nearest even, NaN to NaN; float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exact = arguments[0]
        if signature.args[1].dtype == types.float32:
            return exact
        if signature.args[1].dtype == types.int16:
            return builder.fpext(builder.fptrunc(exact, _HALF), _F32)
        bits = builder.bitcast(exact, _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        near = builder.add(builder.add(bits, odd), _I32(0x7FFF))
        cut = builder.bitcast(builder.and_(near, _I32(0xFFFF0000)), _F32)
        # Rounding up could carry a NaN's last bits into its sign.
        return builder.select(builder.fcmp_unordered("uno", exact, exact), exact, cut)

    return types.float32(value, like), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2ⁿ as float32 for an int32 −126 ≤ n ≤ 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(arguments[0], _I32(127)), _I32(23)), _F32)

    return types.float32(exponent), generate


def _add_products(
    builder: Any,
    stored: Any,
    weight_row: Any,
    token_rows: list[Any],
    sums: list[Any],
    steps: tuple[Any, Any, int],
) -> None:
    """For k from start to stop by width: sums[t] = weight[k…] · token_rows[t][k…] + sums[t]."""
    start, stop, width = steps
    kind = _F32 if width == 1 else ir.VectorType(_F32, width)
    name = "llvm.fma.f32" if width == 1 else f"llvm.fma.v{width}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), name
    )
    with cgutils.for_range_slice(builder, start, stop, _I64(width), intp=_I64) as (k, _):
        weight = _widen(builder, stored, _load(builder, weight_row, k, width), width)
        for token_row, total in zip(token_rows, sums, strict=True):
            value = _load(builder, token_row, k, width)
            builder.store(builder.call(function, [weight, value, builder.load(total)]), total)


def _load(builder: Any, row: Any, k: Any, width: int) -> Any:
    """`width` neighbours of a row, from an address that is aligned to one of them only."""
    element = row.type.pointee
    place = builder.gep(row, [k])
    if width > 1:
        place = builder.bitcast(place, ir.VectorType(element, width).as_pointer())
    return builder.load(place, align=2 if element == _I16 else 4)


def _widen(builder: Any, stored: Any, value: Any, width: int) -> Any:
    if stored == types.float32:
        return value

    def of(element: Any) -> Any:
        return element if width == 1 else ir.VectorType(element, width)

    if stored == types.int16:
        return builder.fpext(builder.bitcast(value, of(_HALF)), of(_F32))
    sixteen = _I32(16) if width == 1 else ir.Constant(of(_I32), [_I32(16)] * width)
    return builder.bitcast(builder.shl(builder.zext(value, of(_I32)), sixteen), of(_F32))


def _tree(builder: Any, lanes: Any) -> Any:
    """The sum of the lanes: upper half to lower half until one is left."""
    width = lanes.type.count
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                lanes,
                ir.Constant(lanes.type, ir.Undefined),
                ir.Constant(ir.VectorType(_I32, width), [_I32(at + i) for i in range(width)]),
            )
            for at in (0, width)
        ]
        lanes = builder.fadd(*halves)
    return builder.extract_element(lanes, _I32(0))


def _zero(kind: Any) -> Any:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(_F32, 0.0)] * kind.count)
    return ir.Constant(kind, 0.0)
