"""Vectors, registers and memory for kernels: features of processors that Numba lacks.

A `Pointer` accesses memory, and knows the dtype it points to; indices and strides count elements.
Values are scalars or `Vector`s of the dtype's compute type (types.py).

    pointer_to(dtype)(address)              a pointer to elements of dtype
    address_of(pointer)                     its address in bytes
    shift(pointer, count)                   the pointer, moved on by count elements
    shift_bytes(pointer, count)             the pointer, moved on by count bytes
    load(pointer, index)                    one element
    load_vector(pointer, index, LANES)      LANES adjacent elements
    store(pointer, index, value)            a scalar or a vector
    prefetch(pointer, index)                prefetch an element into L2
    splat(scalar, LANES)                    a vector with the scalar in every lane
    a + b, a - b, a * b, a / b              lane by lane
    fma(a, b, c)                            a * b + c, rounded once
    absolute(a)                             |a|
    maximum(a, b)                           lane by lane; b if one is NaN
    less(a, b), select(mask, a, b)          a mask, and a where the mask is true, else b
    any_lane(mask)                          whether any lane of the mask is true
    next_lane(mask, start)                  the first lane from start on that is true
    tile_zero, tile_load, tile_fma ...      see register_tiles.py
    matrix_load, matrix_dot ...             see amx.py
    transpose_square, transpose_pairs       see transpose.py

LANES is a constant of the kernel (module level or closure).
"""

# A kernel may add two vectors without importing a name of that module.
from foo_ops.kernels.simd import arithmetic  # noqa: F401
