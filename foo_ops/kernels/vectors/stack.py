"""Give functions of kernels memory on the stack."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba.extending import intrinsic

from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.values import Pointer


@functools.cache
def stack_memory(dtype: str, count: int) -> Callable:
    """Make a function that returns a pointer to uninitialised memory of its caller."""
    pointer = Pointer(dtype)

    @intrinsic
    def allocate(typing_context):
        def generate(context, builder, signature, args):
            array = ir.ArrayType(ELEMENTS[dtype].storage, count)
            # alloca_once would fill it with zeros.
            with builder.goto_entry_block():
                memory = builder.alloca(array)
            memory.align = 64
            return builder.bitcast(memory, context.get_value_type(pointer))

        return pointer(), generate

    return allocate
