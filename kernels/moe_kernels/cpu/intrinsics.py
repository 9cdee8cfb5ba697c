"""What the vectoriser cannot be trusted with, as LLVM vector operations named for no processor.

`dot_tile` is the inner loop of every matrix product here: a few weight rows against a few tokens,
all their sums in registers. A pair of a row and a token has LANES sums, lane j adding the products
k ≡ j (mod LANES) in order with a fused multiply-add; at the end the lanes are added as a tree:
halves, quarters, eighths, … Products past the last whole group of LANES are added up one by one and
come last. That order depends neither on how many rows and tokens a tile has nor on their place in
it, so a token's bits do not either. On AVX2 a group is two registers, and six pairs fill twelve of
the sixteen; a larger tile goes over its products twice, the lower half of the lanes first. With
AVX-512 or NEON the same program gives the same numbers.

Trees of a tile grow together, two of them in one register, then four, then eight: one by one they
would cost a good part of what the products do.

Stored numbers are float32 arrays, uint16 arrays that hold bfloat16, or int16 arrays that hold
float16 (`arrays` makes them); the array's type selects the code.
All arrays are C-contiguous, indices are not checked.
Neighbours: `product` chooses tiles; `lanes` is the same idea for attention.
"""

# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
MOST_PAIRS = 6
_LINE_BYTES = 64
_AT_ONCE = LANES // 2
_LEAVES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which sum begins where in a tree, so that the totals come out in order."""

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _HALF = ir.FloatType(), ir.HalfType()


@intrinsic(prefer_literal=True)
def dot_tile(
    typing_context: Any,
    rows: Any,
    tokens: Any,
    ahead: Any,
    weights_RK: Any,
    row: Any,
    inputs_TK: Any,
    first: Any,
    outputs_TC: Any,
    column: Any,
) -> Any:
    """outputs[first + t, column + r] = weights[row + r] · inputs[first + t], r < rows, t < tokens.

    `inputs_TK` and `outputs_TC` are float32. `rows`, `tokens` and `ahead` are literals. While the
    tile's weights are read the bytes so many ahead are asked for from memory, in the order in which
    they lie there; with 0 the processor is left to guess, which it does well for a single row.
    """
    tile = (rows.literal_value, tokens.literal_value)
    bytes_ahead = ahead.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _emit_tile(context, builder, signature.args[3:], arguments[3:], tile, bytes_ahead)
        return context.get_dummy_value()

    kinds = (rows, tokens, ahead, weights_RK, row, inputs_TK, first, outputs_TC, column)
    return types.void(*kinds), generate


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
        return _round(builder, signature.args[1].dtype, arguments[0], 1)

    return types.float32(value, like), generate


@intrinsic
def narrowed(typing_context: Any, value: Any, like: Any) -> Any:
    """A float32 as what the array `like` stores: `rounded`, and then without what is zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = signature.args[1].dtype
        exact = _round(builder, stored, arguments[0], 1)
        if stored == types.float32:
            return exact
        if stored == types.int16:
            return builder.bitcast(builder.fptrunc(exact, ir.HalfType()), ir.IntType(16))
        return builder.trunc(builder.lshr(builder.bitcast(exact, _I32), _I32(16)), ir.IntType(16))

    return like.dtype(value, like), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2ⁿ as float32 for an int32 −126 ≤ n ≤ 127."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.shl(builder.add(arguments[0], _I32(127)), _I32(23)), _F32)

    return types.float32(exponent), generate


def _emit_tile(
    context: Any,
    builder: Any,
    kinds: tuple[Any, ...],
    arguments: tuple[Any, ...],
    tile: tuple[int, int],
    bytes_ahead: int,
) -> None:
    """`dot_tile` without its literals."""
    weights, row, inputs, first, outputs, column = (
        context.cast(builder, value, kind, types.int64)
        if isinstance(kind, types.Integer | types.IntegerLiteral)
        else context.make_array(kind)(context, builder, value)
        for value, kind in zip(arguments, kinds, strict=True)
    )
    num_rows, num_tokens = tile
    stored = kinds[0].dtype
    num_k = cgutils.unpack_tuple(builder, inputs.shape, 2)[1]
    num_columns = cgutils.unpack_tuple(builder, outputs.shape, 2)[1]

    def nth_row(data: Any, first: Any, n: int, width: Any) -> Any:
        return builder.gep(data, [builder.mul(builder.add(first, _I64(n)), width)])

    weight_rows = [nth_row(weights.data, row, r, num_k) for r in range(num_rows)]
    token_rows = [nth_row(inputs.data, first, t, num_k) for t in range(num_tokens)]
    whole = builder.and_(num_k, _I64(-LANES))
    operands = (stored, weight_rows, token_rows)
    groups = (_I64(0), whole, LANES)
    if num_rows * num_tokens <= MOST_PAIRS:
        sums = _add_products(builder, *operands, groups, LANES, bytes_ahead)
        halves = [_halved(builder, [(lanes, [n])])[0] for n, lanes in enumerate(sums)]
    else:
        lower, upper = (
            _add_products(
                builder,
                stored,
                [builder.gep(weight_row, [_I64(lane)]) for weight_row in weight_rows],
                [builder.gep(token_row, [_I64(lane)]) for token_row in token_rows],
                groups,
                LANES // 2,
                0,
            )
            for lane in (0, LANES // 2)
        )
        halves = [builder.fadd(*pair) for pair in zip(lower, upper, strict=True)]
    together = _AT_ONCE // num_rows * num_rows
    totals = [_trees(builder, halves[n : n + together]) for n in range(0, len(halves), together)]
    rests = [cgutils.alloca_once(builder, total.type) for total in totals]
    for rest, total in zip(rests, totals, strict=True):
        builder.store(_zero(total.type), rest)
    with builder.if_then(builder.icmp_signed("<", whole, num_k), likely=False):
        products = _add_products(builder, *operands, (whole, num_k, 1), 1, 0)
        for n, product in enumerate(products):
            rest = rests[n // together]
            at = _I32(n % together)
            builder.store(builder.insert_element(builder.load(rest), product, at), rest)
    totals = [
        builder.fadd(total, builder.load(rest)) for rest, total in zip(rests, totals, strict=True)
    ]
    for t in range(num_tokens):
        target = builder.gep(nth_row(outputs.data, first, t, num_columns), [column])
        total, at = totals[t * num_rows // together], t * num_rows % together
        lanes = [_I32(at + r) for r in range(num_rows)]
        row_sums = _shuffled(builder, total, total, lanes)
        builder.store(row_sums, builder.bitcast(target, row_sums.type.as_pointer()), align=4)


def _add_products(
    builder: Any,
    stored: Any,
    weight_rows: list[Any],
    token_rows: list[Any],
    steps: tuple[Any, Any, int],
    width: int,
    bytes_ahead: int,
) -> list[Any]:
    """For k from start to stop by step, `width` neighbours k… at once, from zero:
    sums[t, r] = weight_rows[r][k…] · token_rows[t][k…] + sums[t, r].
    """
    start, stop, step = steps
    kind = _F32 if width == 1 else ir.VectorType(_F32, width)
    name = "llvm.fma.f32" if width == 1 else f"llvm.fma.v{width}f32"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 3), name
    )
    sums = [cgutils.alloca_once(builder, kind) for _ in token_rows for _ in weight_rows]
    # The slot of a sum lies in the function's entry; it is emptied at every call.
    for total in sums:
        builder.store(_zero(kind), total)
    with cgutils.for_range_slice(builder, start, stop, _I64(step), intp=_I64) as (k, _):
        if bytes_ahead > 0:
            _ask_ahead(builder, weight_rows, k, width, bytes_ahead)
        for r, weight_row in enumerate(weight_rows):
            weight = _widen(builder, stored, _load(builder, weight_row, k, width), width)
            for t, token_row in enumerate(token_rows):
                total = sums[t * len(weight_rows) + r]
                value = _load(builder, token_row, k, width)
                builder.store(builder.call(function, [weight, value, builder.load(total)]), total)
    return [builder.load(total) for total in sums]


def _ask_ahead(builder: Any, weight_rows: list[Any], k: Any, width: int, ahead: int) -> None:
    """Rows are read side by side, but memory gives most when it is asked for line after line."""
    element = weight_rows[0].type.pointee
    num_bytes = len(weight_rows) * width * (2 if element == _I16 else 4)
    prefetch = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32]),
        "llvm.prefetch.p0i8",
    )
    begin = builder.bitcast(
        builder.gep(weight_rows[0], [builder.mul(k, _I64(len(weight_rows)))]), _I8.as_pointer()
    )
    for line in range(0, num_bytes, _LINE_BYTES):
        place = builder.gep(begin, [_I64(ahead + line)])
        builder.call(prefetch, [place, _I32(0), _I32(3), _I32(1)])


def _load(builder: Any, row: Any, k: Any, width: int) -> Any:
    """`width` neighbours of a row, from an address that is aligned to one of them only."""
    element = row.type.pointee
    place = builder.gep(row, [k])
    if width > 1:
        place = builder.bitcast(place, ir.VectorType(element, width).as_pointer())
    return builder.load(place, align=2 if element == _I16 else 4)


def _round(builder: Any, stored: Any, exact: Any, width: int) -> Any:
    """To what is stored, and float32 again."""
    if stored == types.float32:
        return exact
    if width == 1:
        float32, half, whole = _F32, _HALF, _I32
    else:
        float32, half, whole = (ir.VectorType(each, width) for each in (_F32, _HALF, _I32))

    def same(value: int) -> Any:
        return _I32(value) if width == 1 else ir.Constant(whole, [_I32(value)] * width)

    if stored == types.int16:
        return builder.fpext(builder.fptrunc(exact, half), float32)
    bits = builder.bitcast(exact, whole)
    odd = builder.and_(builder.lshr(bits, same(16)), same(1))
    near = builder.add(builder.add(bits, odd), same(0x7FFF))
    cut = builder.bitcast(builder.and_(near, same(0xFFFF0000)), float32)
    # Rounding up could carry a NaN's last bits into its sign.
    return builder.select(builder.fcmp_unordered("uno", exact, exact), exact, cut)


def _widen(builder: Any, stored: Any, value: Any, width: int) -> Any:
    if stored == types.float32:
        return value

    def of(element: Any) -> Any:
        return element if width == 1 else ir.VectorType(element, width)

    if stored == types.int16:
        return builder.fpext(builder.bitcast(value, of(_HALF)), of(_F32))
    sixteen = _I32(16) if width == 1 else ir.Constant(of(_I32), [_I32(16)] * width)
    return builder.bitcast(builder.shl(builder.zext(value, of(_I32)), sixteen), of(_F32))


def _trees(builder: Any, halves: list[Any]) -> Any:
    """Totals of up to _AT_ONCE sums in their order: upper half to lower half until one is left.

    What a register gains in room by halving its sums, those of another one fill.
    """
    leaves = [halves[min(n, len(halves) - 1)] for n in _LEAVES]
    registers = [(lanes, [n]) for n, lanes in enumerate(leaves)]
    while len(registers) > 1:
        pairs = zip(registers[::2], registers[1::2], strict=True)
        registers = [_halved(builder, list(pair)) for pair in pairs]
    return registers[0][0]


def _halved(builder: Any, registers: list[tuple[Any, list[int]]]) -> tuple[Any, list[int]]:
    """One register of the sums of one or two, each sum's upper half added to its lower half.

    A register comes with the sums that share it, in the order of their lanes. They stay in the half
    of a register in which they were, because crossing over costs a processor more.
    """
    width, num_sums = registers[0][0].type.count, len(registers[0][1])
    size = width // num_sums
    middle = (num_sums + 1) // 2
    sides = (range(middle), range(middle, num_sums))
    order = [(r, at) for side in sides for r in range(len(registers)) for at in side]
    lower = [r * width + at * size + i for r, at in order for i in range(size // 2)]
    halves = [
        _shuffled(
            builder, registers[0][0], registers[-1][0], [_I32(lane + shift) for lane in lower]
        )
        for shift in (0, size // 2)
    ]
    return builder.fadd(*halves), [registers[r][1][at] for r, at in order]


def _shuffled(builder: Any, first: Any, second: Any, lanes: list[Any]) -> Any:
    mask = ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)
    return builder.shuffle_vector(first, second, mask)


def _zero(kind: Any) -> Any:
    if isinstance(kind, ir.VectorType):
        return ir.Constant(kind, [ir.Constant(_F32, 0.0)] * kind.count)
    return ir.Constant(kind, 0.0)
