"""The memory of a kernel: scratch memory, the stack, and its launcher's parameters."""

from __future__ import annotations

import dataclasses
import functools
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
from foo_ops.kernels.simd.memory import address_of, store
from foo_ops.kernels.simd.types import ELEMENTS, INT64, Pointer

# ----------------------------------------------------------------------------------- scratch memory

# Lays out the scratch memory of a kernel: its regions, one after the other, and their sizes.
#
# A kernel describes its regions in one place, as a count of elements of the compute type for each
# name. The kernel's pointers, and the bytes that a launcher allocates, are derived from it.


# Guard elements before, between and after the regions, which no kernel may write to. Only tests set
# this; they must also set FOO_CACHE_DIR to a separate folder for compiled kernels.
FENCE = 0


@dataclasses.dataclass(frozen=True)
class Scratch:
    """The regions of a kernel's scratch memory.

    Attributes:
        dtype: the compute type of the kernel.
        sizes_of: ``sizes_of(parameters, piece)``, a function for Numba, returns a tuple of the
            sizes that the regions depend on. No region may be smaller for a work item of more rows.
        describe: ``describe(*sizes)`` maps the name of each region to its number of elements, or to
            the name of the region that it shares. It may only use +, * and `larger`, since it is
            called with integers and with LLVM values.
    """

    dtype: str
    sizes_of: Callable[[Any, Any], tuple[int, ...]]
    describe: Callable[..., dict[str, Any]]

    def offsets(self, sizes: tuple[Any, ...]) -> tuple[dict[str, tuple[Any, Any]], Any]:
        """Return each region's offset and number of elements, and the size of all regions."""
        regions: dict[str, tuple[Any, Any]] = {}
        stop: Any = FENCE
        for name, count in self.describe(*sizes).items():
            if isinstance(count, str):
                regions[name] = regions[count]
            else:
                regions[name] = (stop, count)
                stop = stop + count + FENCE
        return regions, stop


class _Size:
    """A size that is known only when the kernel runs: an LLVM value."""

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
    """Return the larger of two sizes."""
    return first.larger(second) if isinstance(first, _Size) else max(first, second)


class Regions(types.Type):
    """Pointers to the regions, by name."""

    def __init__(self, scratch: Pointer, names: tuple[str, ...]) -> None:
        self.scratch = scratch
        self.names = names
        # A digest keeps symbols short: see `Struct`.
        digest = hashlib.sha256(repr(names).encode()).hexdigest()[:8]
        super().__init__(f"Regions({scratch})_{digest}")


@register_model(Regions)
class _RegionsModel(models.StructModel):
    def __init__(self, manager: Any, type_: Regions) -> None:
        super().__init__(manager, type_, [(name, type_.scratch) for name in type_.names])


@infer_getattr
class _RegionsAttributes(AttributeTemplate):
    key = Regions

    def generic_resolve(self, regions: Regions, name: str) -> types.Type | None:
        return regions.scratch if name in regions.names else None


@lower_getattr_generic(Regions)
def _get_region(context, builder, regions, value, name):
    return builder.extract_value(value, regions.names.index(name))


def _sizes(builder: ir.IRBuilder, sizes: ir.Value) -> tuple[_Size, ...]:
    count = len(sizes.type.elements) if hasattr(sizes.type, "elements") else sizes.type.count
    return tuple(_Size(builder, builder.extract_value(sizes, i)) for i in range(count))


def _value(size: Any) -> ir.Value:
    return size.value if isinstance(size, _Size) else INT64(size)


def _make_placer(layout: Scratch) -> Callable:
    """Make ``place(scratch, sizes)``, which returns the pointers to the regions."""

    @intrinsic
    def place(typing_context, scratch, sizes):
        names = tuple(layout.offsets((1,) * len(sizes))[0])
        result = Regions(scratch, names)

        def generate(context, builder, signature, args):
            regions, _ = layout.offsets(_sizes(builder, args[1]))
            value = ir.Constant(context.get_value_type(result), ir.Undefined)
            for position, (start, _) in enumerate(regions.values()):
                pointer = builder.gep(args[0], [_value(start)])
                value = builder.insert_value(value, pointer, position)
            return value

        return result(scratch, sizes), generate

    return place


def _make_counter(layout: Scratch) -> Callable:
    """Make ``count_bytes(sizes)``: the bytes of all regions."""
    size = ELEMENTS[layout.dtype].size

    @intrinsic
    def count_bytes(typing_context, sizes):
        def generate(context, builder, signature, args):
            _, count = layout.offsets(_sizes(builder, args[0]))
            return _value(count * size)

        return types.int64(sizes), generate

    return count_bytes


def make_kernel_with_scratch(
    body: Callable, layout: Scratch, argument_types: tuple[Any, ...]
) -> Kernel:
    """Make the kernel that calls ``body(parameters, piece, memory)`` with the regions as memory.

    If its argument ``bytes`` is not null, the kernel only writes there how many bytes of scratch
    memory the work item needs.
    """
    sizes_of, place, count_bytes = layout.sizes_of, _make_placer(layout), _make_counter(layout)
    compiled = njit(body)

    def kernel(parameters, piece, scratch, bytes):
        sizes = sizes_of(parameters, piece)
        if address_of(bytes) != 0:
            store(bytes, 0, count_bytes(sizes))
        else:
            compiled(parameters, piece, place(scratch, sizes))

    return Kernel(kernel, argument_types)


# -------------------------------------------------------------------------------------------- stack

# Gives functions of kernels memory on the stack.


@functools.cache
def stack_memory(dtype: str, count: int) -> Callable:
    """Make a function that returns a pointer to uninitialised memory on its caller's stack."""
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


# -------------------------------------------------------------------------- parameters of launchers

# Reads the parameters that a launcher passes to a kernel: a C struct of fields of 8 bytes.


class Struct(types.Type):
    """A pointer to a struct. ``fields`` are (name, type) in the order of the C++ struct.

    A type is int64, float64 or a `Pointer`.
    """

    def __init__(self, name: str, fields: tuple[tuple[str, types.Type], ...]) -> None:
        self.fields = dict(fields)
        # The name identifies the type and is part of every symbol: spelt out, the fields of
        # attention's parameters would add kilobytes to each.
        digest = hashlib.sha256(repr([(field, str(type_)) for field, type_ in fields]).encode())
        super().__init__(f"{name}_{digest.hexdigest()[:8]}")


@register_model(Struct)
class _StructModel(models.PrimitiveModel):
    def __init__(self, manager: Any, type_: Struct) -> None:
        super().__init__(manager, type_, ir.IntType(64).as_pointer())


@infer_getattr
class _StructAttributes(AttributeTemplate):
    key = Struct

    def generic_resolve(self, struct: Struct, name: str) -> types.Type | None:
        return struct.fields.get(name)


@lower_getattr_generic(Struct)
def _get_attribute(context, builder, struct, value, name):
    return _load_field(context, builder, struct, value, name)


def _load_field(context, builder, struct, value, name):
    position = list(struct.fields).index(name)
    bits = builder.load(builder.gep(value, [ir.IntType(64)(position)]))
    type_ = struct.fields[name]
    if isinstance(type_, Pointer):
        return builder.inttoptr(bits, context.get_value_type(type_))
    return builder.bitcast(bits, context.get_value_type(type_))


@intrinsic(prefer_literal=True)
def field(typing_context, struct, name):
    """Read a field of a struct; its name must be a constant."""

    def generate(context, builder, signature, args):
        return _load_field(context, builder, struct, args[0], name.literal_value)

    return struct.fields[name.literal_value](struct, name), generate


@intrinsic(prefer_literal=True)
def row_of(typing_context, struct, operand, batch, head, row):
    """Return the pointer to the first element of an operand's row; its name must be a constant.

    The struct has the operand's pointer and its strides in elements, named after it: query,
    query_batch_stride, query_head_stride, query_row_stride.
    """
    name = operand.literal_value

    def generate(context, builder, signature, args):
        value, _, *indices = args
        pointer = _load_field(context, builder, struct, value, name)
        for axis, index in zip(("batch", "head", "row"), indices):
            stride = _load_field(context, builder, struct, value, f"{name}_{axis}_stride")
            pointer = builder.gep(pointer, [builder.mul(index, stride)])
        return pointer

    places = (types.int64, types.int64, types.int64)
    return struct.fields[name](struct, operand, *places), generate


@intrinsic
def call_function(typing_context, address, first, second, third):
    """Call the function at an address, which takes three numbers and returns nothing."""

    def generate(context, builder, signature, args):
        word = ir.IntType(64)
        function = ir.FunctionType(ir.VoidType(), [word] * 3).as_pointer()
        builder.call(builder.inttoptr(args[0], function), args[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate
