"""Eight float32 side by side as one value of numba, so that a kernel says which additions happen in
which order instead of hoping for a vectoriser.

The operations are LLVM's own vector instructions, named for no processor: on AVX2 a value is one
register, with AVX-512 or NEON the same program gives the same numbers. Every operation rounds as
IEEE says and nothing is reassociated; `fma` rounds once.
Memory is an array of bytes, or an address, and an offset in bytes, without bounds checks and of any
alignment: pages of every format, and the scratch they are decoded to, are then one kind of thing.
The loops over keys take addresses. An array handed from function to function is seven numbers and
two calls that count its references, which is a good part of what multiplying sixteen keys costs;
but whoever takes an address has to see to it that a caller holds the array.
Neighbours: `small_floats` decodes what pages store in four and eight bits, `attention_products`
multiplies and adds.
"""

# mypy: ignore-errors

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

WIDTH = 8

_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_F32, _HALF = ir.FloatType(), ir.HalfType()
_LANES = ir.VectorType(_F32, WIDTH)


class LanesType(types.Type):
    def __init__(self):
        super().__init__(name="float32x8")


lanes = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _LANES)


def _same(element, value, count=WIDTH):
    """A constant vector."""
    return ir.Constant(ir.VectorType(element, count), [ir.Constant(element, value)] * count)


def _pointer(context, builder, memory_type, memory, offset, pointee):
    if isinstance(memory_type, types.Integer):
        start = builder.inttoptr(memory, _I8.as_pointer())
    else:
        data = context.make_array(memory_type)(context, builder, memory).data
        start = builder.bitcast(data, _I8.as_pointer())
    return builder.bitcast(builder.gep(start, [offset]), pointee.as_pointer())


def _load(context, builder, signature, arguments, element, count=WIDTH):
    vector = ir.VectorType(element, count)
    pointer = _pointer(context, builder, signature.args[0], *arguments[:2], vector)
    return builder.load(pointer, align=1)


def _splat(builder, value, count=WIDTH):
    vector = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(first, first, _same(_I32, 0, count))


def _slice(builder, vector, start, count):
    picks = ir.Constant(ir.VectorType(_I32, count), [_I32(start + lane) for lane in range(count)])
    return builder.shuffle_vector(vector, vector, picks)


def _call(builder, name, *arguments):
    kinds = [argument.type for argument in arguments]
    function = get_or_insert_function(
        builder.module, ir.FunctionType(arguments[0].type, kinds), name
    )
    return builder.call(function, arguments)


@intrinsic
def address_of(typing_context, array):
    """Int64: where the array's first element lies. A caller has to hold the array meanwhile."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _I64)

    return types.int64(array), generate


@intrinsic
def keep_apart(typing_context):
    """Keep the function in which this is called from being made part of its callers.

    A loop that needs most of the processor's registers is slower by a fifth where it lies among
    others that want some, too.
    """

    def generate(context, builder, signature, arguments):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def splat(typing_context, value):
    """The float32 `value` in every lane."""

    def generate(context, builder, signature, arguments):
        return _splat(builder, arguments[0])

    return lanes(types.float32), generate


@intrinsic
def fma(typing_context, a, b, c):
    """a · b + c, rounded once."""

    def generate(context, builder, signature, arguments):
        return _call(builder, "llvm.fma.v8f32", *arguments)

    return lanes(lanes, lanes, lanes), generate


@intrinsic
def add(typing_context, a, b):
    def generate(context, builder, signature, arguments):
        return builder.fadd(*arguments)

    return lanes(lanes, lanes), generate


@intrinsic
def multiply(typing_context, a, b):
    def generate(context, builder, signature, arguments):
        return builder.fmul(*arguments)

    return lanes(lanes, lanes), generate


@intrinsic
def maximum(typing_context, a, b):
    """a where a > b, else b: a NaN in a is passed over."""

    def generate(context, builder, signature, arguments):
        a, b = arguments
        return builder.select(builder.fcmp_ordered(">", a, b), a, b)

    return lanes(lanes, lanes), generate


def _halves(builder, vector, combine):
    """One float of eight: lanes 4 apart, then 2, then 1."""
    count = WIDTH
    while count > 1:
        count //= 2
        upper = _slice(builder, vector, count, count)
        vector = combine(_slice(builder, vector, 0, count), upper)
    return builder.extract_element(vector, _I32(0))


@intrinsic
def sum_of(typing_context, a):
    """float32: lanes 4 apart are added, then 2, then 1."""

    def generate(context, builder, signature, arguments):
        return _halves(builder, arguments[0], builder.fadd)

    return types.float32(lanes), generate


@intrinsic
def largest_of(typing_context, a):
    """float32, of lanes that are no NaN."""

    def generate(context, builder, signature, arguments):
        def larger(x, y):
            return builder.select(builder.fcmp_ordered(">", x, y), x, y)

        return _halves(builder, arguments[0], larger)

    return types.float32(lanes), generate


@intrinsic
def store_sums(typing_context, memory, offset, other_offset, a, b, c, d, e, f, g, h):
    """`sum_of` each of a, b, c, d side by side, and of e, f, g, h at the other offset: the same
    additions, shared by fewer instructions."""

    def generate(context, builder, signature, arguments):
        array, *offsets = arguments[:3]
        vectors = arguments[3:]
        for apart in (4, 2, 1):
            half = len(vectors) // 2
            pairs = zip(vectors[:half], vectors[half:], strict=True)
            vectors = [_folded(builder, x, y, apart) for x, y in pairs]
        for place, at in enumerate(offsets):
            sums = _slice(builder, vectors[0], 4 * place, 4)
            pointer = _pointer(context, builder, signature.args[0], array, at, sums.type)
            builder.store(sums, pointer, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, types.int64, *[lanes] * 8), generate


def _folded(builder, x, y, apart):
    """Sums of lanes that are `apart`: of x where a lane's number lacks that bit, else of y."""

    def picked(flip):
        picks = [(lane & apart and WIDTH) + (lane ^ flip) for lane in range(WIDTH)]
        mask = ir.Constant(ir.VectorType(_I32, WIDTH), [_I32(pick) for pick in picks])
        return builder.shuffle_vector(x, y, mask)

    return builder.fadd(picked(0), picked(apart))


_TERMS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
_LN2_HIGH, _LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6
_SMALLEST = -87.0


@intrinsic
def exp_nonpositive(typing_context, x):
    """eˣ of x ≤ 0 within 2 units of the last place; 0 below e⁻⁸⁷; NaN of NaN.

    eˣ = 2ⁿ · eʳ with n the whole number next to x/ln 2, eʳ by its Taylor terms (|r| ≤ .35).
    """

    def generate(context, builder, signature, arguments):
        (x,) = arguments
        # A NaN must not reach the conversion to a whole number, whose result would be undefined.
        above = builder.fcmp_ordered(">", x, _same(_F32, _SMALLEST))
        bounded = builder.select(above, x, _same(_F32, _SMALLEST))
        n = _call(
            builder, "llvm.rint.v8f32", builder.fmul(bounded, _same(_F32, 1.4426950408889634))
        )
        r = _call(builder, "llvm.fma.v8f32", n, _same(_F32, -_LN2_HIGH), x)
        r = _call(builder, "llvm.fma.v8f32", n, _same(_F32, -_LN2_LOW), r)
        series = _same(_F32, _TERMS[0])
        for term in _TERMS[1:]:
            series = _call(builder, "llvm.fma.v8f32", series, r, _same(_F32, term))
        whole = builder.fptosi(n, ir.VectorType(_I32, WIDTH))
        exponent = builder.shl(builder.add(whole, _same(_I32, 127)), _same(_I32, 23))
        value = builder.fmul(series, builder.bitcast(exponent, _LANES))
        below = builder.fcmp_ordered("<", x, _same(_F32, _SMALLEST))
        return builder.select(below, _same(_F32, 0.0), value)

    return lanes(lanes), generate


@intrinsic
def load(typing_context, memory, offset):
    """Eight float32."""

    def generate(context, builder, signature, arguments):
        return _load(context, builder, signature, arguments, _F32)

    return lanes(memory, types.int64), generate


@intrinsic
def load_splat(typing_context, memory, offset):
    """One float32 in every lane."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments, _F32)
        return _splat(builder, builder.load(pointer, align=1))

    return lanes(memory, types.int64), generate


@intrinsic
def load_float(typing_context, memory, offset):
    """One float32."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments, _F32)
        return builder.load(pointer, align=1)

    return types.float32(memory, types.int64), generate


@intrinsic
def store(typing_context, memory, offset, value):
    """Eight float32, or one where `value` is a float32."""

    def generate(context, builder, signature, arguments):
        array, offset, value = arguments
        pointer = _pointer(context, builder, signature.args[0], array, offset, value.type)
        builder.store(value, pointer, align=1)
        return context.get_dummy_value()

    kind = lanes if value == lanes else types.float32
    return types.void(memory, types.int64, kind), generate


@intrinsic
def load_bf16(typing_context, memory, offset):
    """Eight bfloat16."""

    def generate(context, builder, signature, arguments):
        bits = _load(context, builder, signature, arguments, _I16)
        wide = builder.zext(bits, ir.VectorType(_I32, WIDTH))
        return builder.bitcast(builder.shl(wide, _same(_I32, 16)), _LANES)

    return lanes(memory, types.int64), generate


@intrinsic
def load_fp16(typing_context, memory, offset):
    """Eight halves."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(_load(context, builder, signature, arguments, _HALF), _LANES)

    return lanes(memory, types.int64), generate


@intrinsic
def store_fp16(typing_context, memory, offset, value):
    """Eight halves, the nearest, even at a midpoint; infinite where none is large enough."""

    def generate(context, builder, signature, arguments):
        array, offset, value = arguments
        halves = builder.fptrunc(value, ir.VectorType(_HALF, WIDTH))
        pointer = _pointer(context, builder, signature.args[0], array, offset, halves.type)
        builder.store(halves, pointer, align=1)
        return context.get_dummy_value()

    return types.void(memory, types.int64, lanes), generate


@intrinsic
def prefetch(typing_context, memory, offset):
    """Ask for the cache line at `offset`, which need not exist."""

    def generate(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature.args[0], *arguments, _I8)
        kinds = [_I8.as_pointer(), _I32, _I32, _I32]
        function = get_or_insert_function(
            builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0"
        )
        builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(memory, types.int64), generate
