"""The scratch memory of a kernel: which parts it has, one after the other, and how large they are.

A kernel describes its parts in one place, as counts of elements of the compute type by name. From
that come the pointers that the kernel works with, and the bytes that a launcher has to allocate.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit
from numba.core import types
from numba.core.imputils import lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic, models, register_model

from foo_ops.kernels.compiler.kernel import Kernel
from foo_ops.kernels.vectors.elements import ELEMENTS
from foo_ops.kernels.vectors.instructions import INT64
from foo_ops.kernels.vectors.memory import address_of, store
from foo_ops.kernels.vectors.values import Pointer

# Elements before, between and behind the parts, which no kernel may write to. Only a test has some:
# it must also choose a folder of its own for compiled kernels, FOO_CACHE_DIR.
FENCE = 0


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The parts of a kernel's scratch memory.

    Attributes:
        dtype: the compute type of the kernel.
        sizes_of: ``sizes_of(parameters, piece)``, a function for Numba, returns a tuple of what the
            parts depend on. None of the parts may be smaller for a piece with more rows.
        describe: ``describe(*sizes)`` returns for the name of each part how many elements it has,
            or the name of the part that it shares. It calculates with +, * and `larger`, since it
            is called with numbers, and with what stands for them in a kernel.
    """

    dtype: str
    sizes_of: Callable[[Any, Any], tuple[int, ...]]
    describe: Callable[..., dict[str, Any]]

    def offsets(self, sizes: tuple[Any, ...]) -> tuple[dict[str, tuple[Any, Any]], Any]:
        """Where each part begins, and how many elements it has; and the size of all."""
        parts: dict[str, tuple[Any, Any]] = {}
        stop: Any = FENCE
        for name, count in self.describe(*sizes).items():
            if isinstance(count, str):
                parts[name] = parts[count]
            else:
                parts[name] = (stop, count)
                stop = stop + count + FENCE
        return parts, stop


class _Size:
    """A number that is known when the kernel runs."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder, self.value = builder, value

    def _of(self, other: Any) -> ir.Value:
        return other.value if isinstance(other, _Size) else INT64(other)

    def __add__(self, other: Any) -> _Size:
        return _Size(self.builder, self.builder.add(self.value, self._of(other)))

    def __mul__(self, other: Any) -> _Size:
        return _Size(self.builder, self.builder.mul(self.value, self._of(other)))

    def larger(self, other: Any) -> _Size:
        is_larger = self.builder.icmp_signed(">", self.value, self._of(other))
        return _Size(self.builder, self.builder.select(is_larger, self.value, self._of(other)))

    __radd__, __rmul__ = __add__, __mul__


def larger(first: Any, second: Any) -> Any:
    """The larger of two sizes."""
    return first.larger(second) if isinstance(first, _Size) else max(first, second)


class Parts(types.Type):
    """Pointers to the parts by their names."""

    def __init__(self, scratch: Pointer, names: tuple[str, ...]) -> None:
        self.scratch = scratch
        self.names = names
        # As `foo_ops.kernels.vectors.struct.Struct` has it.
        digest = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
        super().__init__(f"Parts({scratch})_{digest}")


@register_model(Parts)
class _PartsModel(models.StructModel):
    def __init__(self, manager: Any, type_: Parts) -> None:
        super().__init__(manager, type_, [(name, type_.scratch) for name in type_.names])


@infer_getattr
class _PartsAttributes(AttributeTemplate):
    key = Parts

    def generic_resolve(self, parts: Parts, name: str) -> types.Type | None:
        return parts.scratch if name in parts.names else None


@lower_getattr_generic(Parts)
def _get_part(context, builder, parts, value, name):
    return builder.extract_value(value, parts.names.index(name))


def _sizes(builder: ir.IRBuilder, sizes: ir.Value) -> tuple[_Size, ...]:
    count = len(sizes.type.elements) if hasattr(sizes.type, "elements") else sizes.type.count
    return tuple(_Size(builder, builder.extract_value(sizes, i)) for i in range(count))


def _value(size: Any) -> ir.Value:
    return size.value if isinstance(size, _Size) else INT64(size)


def _placer_of(layout: Scratch) -> Callable:
    """``place(scratch, sizes)``: the pointers to the parts."""

    @intrinsic
    def place(typing_context, scratch, sizes):
        names = tuple(layout.offsets((1,) * len(sizes))[0])
        result = Parts(scratch, names)

        def generate(context, builder, signature, args):
            parts, _ = layout.offsets(_sizes(builder, args[1]))
            value = ir.Constant(context.get_value_type(result), ir.Undefined)
            for position, (start, _) in enumerate(parts.values()):
                pointer = builder.gep(args[0], [_value(start)])
                value = builder.insert_value(value, pointer, position)
            return value

        return result(scratch, sizes), generate

    return place


def _counter_of(layout: Scratch) -> Callable:
    """``count_bytes(sizes)``: of all parts."""
    size = ELEMENTS[layout.dtype].size

    @intrinsic
    def count_bytes(typing_context, sizes):
        def generate(context, builder, signature, args):
            _, count = layout.offsets(_sizes(builder, args[0]))
            return _value(count * size)

        return types.int64(sizes), generate

    return count_bytes


def kernel_with_scratch(body: Callable, layout: Scratch, argument_types: tuple[Any, ...]) -> Kernel:
    """The kernel that calls ``body(parameters, piece, memory)`` with the parts as ``memory``.

    Where ``bytes`` is given, it only writes there how many it needs for a piece.
    """
    sizes_of, place, count_bytes = layout.sizes_of, _placer_of(layout), _counter_of(layout)
    compiled = njit(body)

    def kernel(parameters, piece, scratch, bytes):
        sizes = sizes_of(parameters, piece)
        if address_of(bytes) != 0:
            store(bytes, 0, count_bytes(sizes))
        else:
            compiled(parameters, piece, place(scratch, sizes))

    return Kernel(kernel, argument_types)
