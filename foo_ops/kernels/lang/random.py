"""Draw random numbers that depend on their position, not on the order of drawing.

Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") is a block cipher
that turns a counter of four words into four random words. A backward pass, with tiles of other
sizes or in other threads, computes the same numbers again.
"""

from __future__ import annotations

from llvmlite import ir
from numba.core import errors, types
from numba.extending import intrinsic

from foo_ops.kernels.simd.memory import emit_load_vector
from foo_ops.kernels.simd.types import (
    ELEMENTS,
    FLOAT,
    INT32,
    INT64,
    constant_of,
    emit_splat,
    shaped,
)

ROUNDS = 10
# Words of a counter, and of the random words it yields.
WORDS = 4
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL_STEPS = (0x9E3779B9, 0xBB67AE85)


@intrinsic(prefer_literal=True)
def store_dropout_mask(
    typing_context, target, stride, group, queries, heads, seed, threshold, lanes
):
    """Store four rows: 1.0 where a random word is at least the threshold, and 0.0 elsewhere.

    The counter is (group, query, head, 0), where ``queries`` and ``heads`` point to the int32 of
    each lane; row i has the i-th word. ``seed`` is the key, of 64 bits.
    """
    count = lanes.literal_value

    def generate(context, builder, signature, args):
        pointer, step, group_value, query_pointer, head_pointer, key, limit, _ = args

        def vector(value: ir.Value) -> ir.Value:
            return emit_splat(builder, builder.trunc(value, INT32), count)

        counter = [
            vector(group_value),
            emit_load_vector(builder, "int32", query_pointer, INT64(0), count),
            emit_load_vector(builder, "int32", head_pointer, INT64(0), count),
            vector(INT64(0)),
        ]
        keys = [vector(key), vector(builder.lshr(key, INT64(32)))]
        limits = vector(limit)
        float_type = ir.VectorType(ELEMENTS[target.dtype].storage, count)
        for row, word in enumerate(_philox(builder, counter, keys)):
            kept = builder.icmp_unsigned(">=", word, limits)
            value = builder.select(kept, constant_of(float_type, 1.0), constant_of(float_type, 0.0))
            address = builder.gep(pointer, [builder.mul(step, INT64(row))])
            address = builder.bitcast(address, float_type.as_pointer())
            builder.store(value, address, align=ELEMENTS[target.dtype].size)
        return context.get_dummy_value()

    number, indices = types.int64, type(target)("int32")
    parameters = (target, number, number, indices, indices, number, number, lanes)
    return types.void(*parameters), generate


@intrinsic
def random(typing_context, seed, offset):
    """Return a float32 from 0 to below 1 that depends only on a seed and an offset.

    Numbers at different offsets are independent: use an element's index as its offset, and for a
    second number an offset that no element has. All 2^64 seeds and offsets give different streams.
    The number is the first word of Philox for the counter (offset, 0), in steps of 2^-24.

    Example:
        >>> y[i] = x[i] / 0.9 if language.random(2026, i) >= 0.1 else 0.0
    """
    for name, number in (("seed", seed), ("offset", offset)):
        if not isinstance(number, types.Integer):
            raise errors.TypingError(f"random: {name} must be an integer, got {number}")

    def generate(context, builder, signature, args):
        (key_low, key_high), (low, high) = (
            (builder.trunc(word, INT32), builder.trunc(builder.lshr(word, INT64(32)), INT32))
            for word in args
        )
        word = _philox(builder, [low, high, INT32(0), INT32(0)], [key_low, key_high])[0]
        whole = builder.sitofp(builder.lshr(word, INT32(8)), FLOAT)
        return builder.fmul(whole, FLOAT(2.0**-24))

    return types.float32(types.int64, types.int64), generate


def _philox(builder: ir.IRBuilder, counter: list[ir.Value], key: list[ir.Value]) -> list[ir.Value]:
    for _ in range(ROUNDS):
        products = [
            _multiply(builder, word, multiplier)
            for word, multiplier in zip(counter[::2], MULTIPLIERS)
        ]
        (upper0, lower0), (upper1, lower1) = products
        counter = [
            builder.xor(builder.xor(upper1, counter[1]), key[0]),
            lower1,
            builder.xor(builder.xor(upper0, counter[3]), key[1]),
            lower0,
        ]
        key = [
            builder.add(word, constant_of(word.type, step)) for word, step in zip(key, WEYL_STEPS)
        ]
    return counter


def _multiply(builder: ir.IRBuilder, word: ir.Value, multiplier: int) -> tuple[ir.Value, ir.Value]:
    """Return the upper and the lower half of a 64-bit product."""
    wide = shaped(INT64, word.type)
    product = builder.mul(builder.zext(word, wide), constant_of(wide, multiplier))
    upper = builder.trunc(builder.lshr(product, constant_of(wide, 32)), word.type)
    return upper, builder.trunc(product, word.type)
