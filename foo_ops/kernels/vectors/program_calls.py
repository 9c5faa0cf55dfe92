"""Run programs on score tiles in a kernel, and call such a kernel by its address."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from foo_ops.kernels.vectors.emit_program import PLACES, TilePrograms, emit_tile_programs
from foo_ops.kernels.vectors.values import Pointer


def argument_types(dtype: str) -> tuple[Any, ...]:
    """The launcher's arguments, a tile of scores and one of gradients, and a call's place."""
    return (
        Pointer("int64"), Pointer(dtype), Pointer(dtype), *(types.int64 for _ in PLACES)
    )  # fmt: skip


def make_program_runner(programs: TilePrograms) -> Callable:
    """Make ``run(arguments, scores, gradients, *places)``, which holds the code of programs."""
    names = ("arguments", "scores", "gradients", *PLACES)

    @intrinsic
    def run(
        typing_context, arguments, scores, gradients, queries, keys, first_query, first_key, batch,
        head, key_head, chunk,
    ):  # fmt: skip
        def generate(context, builder, signature, args):
            emit_tile_programs(builder, programs, dict(zip(names, args)))
            return context.get_dummy_value()

        return types.void(*argument_types(programs.dtype)), generate

    return run


@functools.cache
def make_program_caller(dtype: str) -> Callable:
    """Make ``call(address, arguments, scores, gradients, *places)``."""

    @intrinsic
    def call(
        typing_context, address, arguments, scores, gradients, queries, keys, first_query,
        first_key, batch, head, key_head, chunk,
    ):  # fmt: skip
        def generate(context, builder, signature, args):
            operands = list(args[1:])
            function = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
            builder.call(builder.inttoptr(args[0], function.as_pointer()), operands)
            return context.get_dummy_value()

        return types.void(types.int64, *argument_types(dtype)), generate

    return call
