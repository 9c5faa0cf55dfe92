"""The registers of a matrix unit, emulated in memory: for kernels that run on one thread.

`FOO_MATRIX_UNIT=1` computes products without registers where there is no AMX. With `emulate`,
kernels keep the instructions' order, and use registers as with AMX.
"""

import numpy as np
from numba import njit
from numba.core import types

from foo_ops.kernels.compiler import processor
from foo_ops.kernels.simd import amx
from foo_ops.kernels.simd.memory import address_of, load, pointer_to, store

SIZE = 16
WORDS = SIZE * SIZE
REGISTERS = np.full(8 * WORDS, np.nan, np.float32)
ADDRESS = REGISTERS.ctypes.data

_floats, _words, _elements = (pointer_to(dtype) for dtype in ("float32", "int32", "bfloat16"))


@njit
def matrix_configure():
    for index in range(8 * WORDS):
        store(_floats(ADDRESS), index, np.nan)


@njit
def matrix_zero(number):
    for index in range(WORDS):
        store(_floats(ADDRESS), number * WORDS + index, 0.0)


@njit
def matrix_load(number, pointer, stride):
    source = _words(address_of(pointer))
    for row in range(SIZE):
        for column in range(SIZE):
            word = load(source, row * stride + column)
            store(_words(ADDRESS), number * WORDS + row * SIZE + column, word)


@njit
def matrix_store(number, pointer, stride):
    target = _words(address_of(pointer))
    for row in range(SIZE):
        for column in range(SIZE):
            word = load(_words(ADDRESS), number * WORDS + row * SIZE + column)
            store(target, row * stride + column, word)


@njit
def matrix_dot(c, a, b):
    elements = _elements(ADDRESS)
    for row in range(SIZE):
        for column in range(SIZE):
            place = c * WORDS + row * SIZE + column
            total = load(_floats(ADDRESS), place)
            for step in range(SIZE):
                left = 2 * (a * WORDS + row * SIZE + step)
                right = 2 * (b * WORDS + step * SIZE + column)
                total += types.float32(load(elements, left)) * load(elements, right)
                total += types.float32(load(elements, left + 1)) * load(elements, right + 1)
            store(_floats(ADDRESS), place, total)


def emulate():
    """Let kernels use these registers. Modules of products must not have been imported."""
    processor.has_matrix_unit = lambda: True
    amx.matrix_configure = amx.matrix_release = matrix_configure
    amx.matrix_zero, amx.matrix_load, amx.matrix_store = matrix_zero, matrix_load, matrix_store
    amx.matrix_dot = matrix_dot
