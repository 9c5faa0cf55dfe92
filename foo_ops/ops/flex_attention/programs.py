"""Record what a user's function computes for one score, as a program."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.compat import (
    DisableAutocast,
    DispatchKey,
    ForceDispatchKeyGuard,
    TorchDispatchMode,
    disabled_torch_function,
    excluded_keys,
    included_keys,
    make_wrapper_subclass,
    pytree,
)
from foo_ops.kernels.flex.program import COMPARISONS, DTYPES, FUNCTIONS, Gradient, Node, Program

# ----------------------------------------------------------------------------------------- building

# Build programs node by node; equal nodes are shared.


_INVOLUTIONS = ("neg", "not")


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in programs."""
    return str(dtype).removeprefix("torch.")


class Builder:
    """Nodes of several programs, and the numbers in the traced functions.

    Each number in a function gets a node of its own, so that a program does not depend on whether
    two happen to be equal. A number that a formula brings is a `constant`, with one node per value.
    """

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.numbers: list[float] = []
        self.integers: list[int] = []
        self._places: dict[Node, int] = {}
        self._constants: dict[tuple[str, float], int] = {}
        self._values: dict[int, float] = {}

    def add(self, dtype: torch.dtype, operation: str, *operands: int, name: str = "") -> int:
        """Return the node of an operation, which may exist already."""
        known = self._simplified(dtype, operation, operands)
        if known is not None:
            return known
        node = Node(name_of(dtype), operation, operands, name)
        place = self._places.setdefault(node, len(self.nodes))
        if place == len(self.nodes):
            self.nodes.append(node)
        return place

    def number(self, value: float, dtype: torch.dtype) -> int:
        """Return a new node for a number in the function."""
        if dtype.is_floating_point:
            self.numbers.append(float(value))
            return self.add(dtype, "number", len(self.numbers) - 1)
        self.integers.append(int(value))
        return self.add(dtype, "integer", len(self.integers) - 1)

    def constant(self, value: float, dtype: torch.dtype) -> int:
        """Return the node for a number that a formula brings."""
        key = (name_of(dtype), value)
        if key not in self._constants:
            self._constants[key] = self.number(value, dtype)
            self._values[self._constants[key]] = value
        return self._constants[key]

    def value_of(self, node: int) -> float | None:
        """Return the value of a constant, and None for all other nodes."""
        return self._values.get(node)

    def dtype_of(self, node: int) -> torch.dtype:
        """Return a node's dtype."""
        dtype: torch.dtype = getattr(torch, self.nodes[node].dtype)
        return dtype

    def _simplified(
        self, dtype: torch.dtype, operation: str, operands: Sequence[int]
    ) -> int | None:
        """Return a simpler node with exactly the value of an operation, or None."""
        first = operands[0] if operands else -1
        if operation == "cast" and self.dtype_of(first) == dtype:
            return first
        if operation == "cast" and first in self._values and not dtype.is_complex:
            return self.constant(_converted(self._values[first], dtype), dtype)
        if operation in _INVOLUTIONS and self.nodes[first].operation == operation:
            return self.nodes[first].operands[0]
        if operation == "where" and operands[1] == operands[2]:
            return operands[1]
        if operation == "mul" and 1 in map(self.value_of, operands):
            return operands[0] if self.value_of(operands[1]) == 1 else operands[1]
        if operation in ("and", "or"):
            return self._simplified_bools(dtype, operation, operands)
        return None

    def _simplified_bools(
        self, dtype: torch.dtype, operation: str, operands: Sequence[int]
    ) -> int | None:
        one, other = operands
        if one == other:
            return one
        for operand, rest in ((one, other), (other, one)):
            if dtype == torch.bool and operand in self._values:
                return rest if bool(self._values[operand]) == (operation == "and") else operand
        return None


def _converted(value: float, dtype: torch.dtype) -> float:
    if dtype == torch.bool:
        return bool(value)
    is_whole = not dtype.is_floating_point and math.isfinite(value)
    return int(value) if is_whole else value


class Texts:
    """Writes programs of one builder, which share the places of captured tensors and numbers.

    Places are numbered in the order of their first use, and nodes follow their operands.
    """

    def __init__(self, builder: Builder) -> None:
        self._builder = builder
        self._captured: dict[int, int] = {}
        self._numbers: dict[int, int] = {}
        self._integers: dict[int, int] = {}

    def write(self, output: int, gradients: Iterable[Gradient] = ()) -> str:
        """Return a program's text, without unused nodes."""
        gradients = tuple(gradients)
        roots = [output, *(node for it in gradients for node in (it.value, *it.indices))]
        places: dict[int, int] = {}
        nodes: list[Node] = []
        for old in self._ordered(roots):
            places[old] = len(nodes)
            nodes.append(self._renumbered(self._builder.nodes[old], places))
        return str(
            Program(
                tuple(nodes),
                places[output],
                tuple(
                    Gradient(
                        _place(self._captured, it.captured),
                        places[it.value],
                        tuple(places[index] for index in it.indices),
                    )
                    for it in gradients
                ),
            )
        )

    def _ordered(self, roots: Sequence[int]) -> list[int]:
        """Return the nodes that the roots need, each after its operands."""
        done: dict[int, None] = {}
        waiting = list(reversed(roots))
        while waiting:
            node = waiting[-1]
            missing = [it for it in self._builder.nodes[node].arguments if it not in done]
            if missing and node not in done:
                waiting.extend(reversed(missing))
            else:
                done.setdefault(waiting.pop())
        return list(done)

    def _renumbered(self, node: Node, places: dict[int, int]) -> Node:
        operands = tuple(places[it] for it in node.arguments)
        tables = {"load": self._captured, "number": self._numbers, "integer": self._integers}
        table = tables.get(node.operation)
        if table is not None:
            operands = (_place(table, node.operands[0]), *operands)
        return Node(node.dtype, node.operation, operands, node.name)

    @property
    def captured(self) -> list[int]:
        """Return the captured tensors that the programs need, in the order of their places."""
        return list(self._captured)

    @property
    def numbers(self) -> list[float]:
        """Return the floating-point numbers that the programs need."""
        return [self._builder.numbers[it] for it in self._numbers]

    @property
    def integers(self) -> list[int]:
        """Return the integers that the programs need."""
        return [self._builder.integers[it] for it in self._integers]


def _place(table: dict[int, int], key: int) -> int:
    return table.setdefault(key, len(table))


# ---------------------------------------------------------------------------------------- recording

# Record what a function computes for one score, while it runs on numbers without values.


# Numbers that are symbolic under torch.compile, such as lengths.
SYMBOLS = (torch.SymInt, torch.SymFloat)
CREATED = (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy, torch.ops.aten.lift)


class RefusalError(Exception):
    """Raised for a function that no program can express: the requirement, and what came."""

    def __init__(self, must: str, got: str, kind: type[Exception] = NotImplementedError) -> None:
        super().__init__(must, got)
        self.must, self.got, self.kind = must, got, kind


def unsupported(got: str) -> RefusalError:
    """Return the refusal of an operation."""
    return RefusalError("must be made of operations on single numbers", got)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a captured tensor: an index for each dimension, None for those that are left."""

    captured: int
    indices: tuple[int | None, ...]

    def indexed(self, indices: Sequence[int | None]) -> Part:
        """Return the part with indices for its first dimensions."""
        new = iter(indices)
        return Part(self.captured, tuple(next(new, None) if i is None else i for i in self.indices))


class Number(Tensor):
    """A tensor without values, on any device, that stands for a node or for a part.

    PyTorch's own FakeTensor would do, at three times the cost and with a second of imports.
    """

    value: int | Part
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Number],
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        value: int | Part,
        requires_grad: bool = False,
    ) -> Number:
        """Make a number that stands for a node or a part."""
        number: Number = make_wrapper_subclass(
            cls, size, dtype=dtype, device=device, requires_grad=requires_grad
        )
        number.value = value
        return number

    @classmethod
    def __torch_dispatch__(cls, func: Any, *rest: Any) -> Any:
        """Refuse operations outside of the trace."""
        raise RuntimeError(
            f"{func}: arguments of a score_mod or mask_mod must not be used outside of the function"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Serve a function that prints its arguments."""
        return f"<number without a value, {self.dtype}>"


@dataclasses.dataclass(frozen=True)
class Load:
    """A number that was read from a captured tensor."""

    tensor: Tensor
    node: int


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation on captured tensors alone, and its results; tensors appear as their ids."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]


class Place(int):
    """The id of a tensor among a step's arguments."""


class Recorder(TorchDispatchMode):
    """Turns each operation on a number without a value into a node of a program.

    Operations on other tensors are computed as usual. Those on captured tensors are recorded as
    `steps`, and their results are captured instead. A tensor that the function creates from nothing
    else is a number, or captured if it has more than one element.
    """

    def __init__(self, builder: Builder, device: torch.device) -> None:
        super().__init__()
        self.builder, self._device = builder, device
        self._excluded = excluded_keys()
        self.captured: list[Tensor] = []
        self.loads: list[Load] = []
        self.steps: list[Step] = []
        self.reads_values = False
        # Formulas of gradients, and decompositions, write in place to tensors that they made.
        self.may_write = False
        self.created: dict[int, Tensor] = {}
        self._nodes: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._loaded: dict[int, int] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since True would import Dynamo: 0.6 s of the first trace."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute, or record, one operation."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        self._refuse_effects(func)
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        if any(isinstance(it, Number) for it in tensors):
            return self._record(func, args, kwargs)
        return self._compute(func, tensors, args, kwargs)

    def _refuse_effects(self, func: Any) -> None:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise RefusalError("must not draw random numbers", operation_name(func))
        if func._schema.is_mutable and not self.may_write:
            raise RefusalError("must not write in place", operation_name(func))

    def _compute(self, func: Any, tensors: list[Tensor], args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        results = pytree.tree_leaves(result)
        self._kept.extend(it for it in (*tensors, *results) if isinstance(it, Tensor))
        if func.overloadpacket in CREATED or all(id(it) in self.created for it in tensors):
            self.created |= {id(it): it for it in results if isinstance(it, Tensor)}
        elif all(isinstance(it, Tensor) for it in results):
            args, kwargs = pytree.tree_map_only(Tensor, lambda it: Place(id(it)), (args, kwargs))
            self.steps.append(Step(func, args, kwargs, tuple(map(id, results))))
        else:
            self.reads_values = True
        return result

    def _record(self, func: Any, args: Any, kwargs: Any) -> Any:
        handler = OPERATIONS.get(func.overloadpacket)
        part = PARTS.get(func.overloadpacket)
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RefusalError(
                "must not branch in Python on a value (use torch.where)",
                "bool, int, float or item of a tensor",
            )
        if handler is None and part is None:
            return self._decomposed(func, args, kwargs)
        if part is not None:
            return self._part(part(self, *args, **kwargs))
        tensors = [it for it in pytree.tree_leaves((args, kwargs)) if isinstance(it, Tensor)]
        is_lost = func._schema.is_mutable and not isinstance(args[0], Number)
        if is_lost or any(it.numel() != 1 for it in tensors):
            raise unsupported(f"{operation_name(func)} of {shapes_of(tensors)}")
        result = func(*pytree.tree_map(example, args), **pytree.tree_map(example, kwargs))
        if not isinstance(result, Tensor) or result.numel() != 1:
            raise unsupported(f"{operation_name(func)} of {shapes_of(tensors)}")
        assert handler is not None
        value = handler(self, result.dtype, *args, **kwargs)
        if func._schema.is_mutable:
            args[0].value = value
            return args[0]
        return Number(result.shape, result.dtype, self._device, value)

    def _part(self, part: Part) -> Number:
        tensor = self.captured[part.captured]
        left = zip(tensor.shape, part.indices, strict=True)
        size = [it for it, index in left if index is None]
        return Number(size, tensor.dtype, self._device, part)

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Record another operation by PyTorch's decomposition of it."""
        from foo_ops.compat import decomposition_table

        is_composite = func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
        decomposition = func.decompose if is_composite else decomposition_table.get(func)
        if decomposition is None:
            raise unsupported(operation_name(func))
        outer, self.may_write = self.may_write, True
        try:
            with self:
                return decomposition(*args, **kwargs)
        except RefusalError as error:
            raise RefusalError(error.must, operation_name(func), error.kind) from error
        finally:
            self.may_write = outer

    def outside(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function as outside of the trace, where torch.func and torch.export may be."""
        included = included_keys()
        keys = ForceDispatchKeyGuard(included, self._excluded)
        with keys, DisableAutocast():
            return func(*args, **kwargs)

    def input(self, name: str, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """Return a number that is an input of the program."""
        node = self.builder.add(dtype, "input", name=name)
        return Number((), dtype, self._device, node, requires_grad)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return the number that stands for a captured tensor in the trace.

        The tensor itself may be wrapped by torch.func, or have a tangent, which only the operator
        should see. All floating-point tensors have gradients, since a program serves all calls.
        """
        if isinstance(tensor, Number) or (id(tensor) in self.created and tensor.dim() == 0):
            return tensor
        if id(tensor) not in self._stand_ins:
            has_gradient = torch.is_grad_enabled() and tensor.dtype.is_floating_point
            part = self.part_of(tensor)
            leaf = Number(tensor.shape, tensor.dtype, self._device, part, has_gradient)
            with self:
                # Not a leaf: autograd would refuse in-place writes to a leaf before we can.
                self._stand_ins[id(tensor)] = torch.ops.aten.index(leaf, [])
        return self._stand_ins[id(tensor)]

    def part_of(self, tensor: Tensor) -> Part:
        """Return a tensor as a part of a captured tensor."""
        if not isinstance(tensor, Number):
            return Part(self._capture(tensor), (None,) * tensor.dim())
        if isinstance(tensor.value, Part):
            return tensor.value
        raise unsupported("an index of a number")

    def operand(self, value: Any, dtype: torch.dtype) -> int:
        """Return the node for an argument of an operation, converted to a dtype.

        Numbers of 16 bits are computed in float32.
        """
        dtype = wide(dtype)
        if isinstance(value, SYMBOLS):
            # Captured, since only captured numbers may differ between calls of a compiled program.
            value = self.outside(tensor_of, value, self._device)
        if isinstance(value, Tensor):
            return self.builder.add(dtype, "cast", self._node_of(value))
        if not isinstance(value, (bool, int, float)):
            raise unsupported(f"{type(value).__name__} {value}")
        zero = self.may_write and value == 0
        return (self.builder.constant if zero else self.builder.number)(value, dtype)

    def _node_of(self, tensor: Tensor) -> int:
        if isinstance(tensor, Number) and isinstance(tensor.value, int):
            return tensor.value
        if id(tensor) in self.created and tensor.dim() == 0:
            return self._number_of(tensor)
        if id(tensor) not in self._loaded:
            self._kept.append(tensor)
            self._loaded[id(tensor)] = self._load(tensor)
        return self._loaded[id(tensor)]

    def _load(self, tensor: Tensor) -> int:
        if tensor.numel() != 1:
            raise unsupported(f"a tensor of shape {list(tensor.shape)}")
        part = self.part_of(tensor)
        zero = self.builder.constant(0, torch.int32) if None in part.indices else 0
        indices = (zero if it is None else it for it in part.indices)
        node = self.builder.add(tensor.dtype, "load", part.captured, *indices)
        self.loads.append(Load(tensor, node))
        return self.builder.add(wide(tensor.dtype), "cast", node)

    def _number_of(self, tensor: Tensor) -> int:
        """Return the node for a number that the function has put in a tensor."""
        if id(tensor) not in self._nodes:
            self._nodes[id(tensor)] = self.operand(tensor.item(), tensor.dtype)
        return self._nodes[id(tensor)]

    def _capture(self, tensor: Tensor) -> int:
        if name_of(tensor.dtype) not in DTYPES:
            raise RefusalError(
                "must capture tensors of bools, integers or floating-point numbers",
                name_of(tensor.dtype),
                TypeError,
            )
        if id(tensor) not in self._places:
            self._places[id(tensor)] = len(self.captured)
            self.captured.append(tensor)
        return self._places[id(tensor)]


def example(value: Any) -> Any:
    """Return a number on the CPU for one without a value, to find the kind of a result."""
    if isinstance(value, Tensor):
        return torch.ones(value.shape, dtype=value.dtype)
    if isinstance(value, SYMBOLS):
        return 1 if isinstance(value, torch.SymInt) else 1.0
    return torch.device("cpu") if isinstance(value, torch.device) else value


def tensor_of(value: Any, device: torch.device) -> Tensor:
    """Return a number in a tensor, by a product, as a symbolic number requires."""
    dtype = torch.float64 if isinstance(value, torch.SymFloat) else torch.int64
    return torch.ones((), dtype=dtype, device=device) * value


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which numbers of a dtype are computed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def operation_name(func: Any) -> str:
    """Return the name by which users know an operator."""
    name = func.overloadpacket.__name__
    if hasattr(torch, name):
        return f"torch.{name}"
    return f"torch.Tensor.{name}" if hasattr(Tensor, name) else str(func.overloadpacket)


def shapes_of(tensors: Sequence[Tensor]) -> str:
    """Return the shapes of tensors, for a message."""
    return "shapes " + ", ".join(str(list(it.shape)) for it in tensors)


# --------------------------------------------------------------------------------------- operations

# Translate PyTorch's operations on numbers to those of programs.


aten = torch.ops.aten

# Returns an operation's node from the recorder, the result's dtype and the operation's arguments.
Operation = Callable[..., int]
OPERATIONS: dict[Any, Operation] = {}
PARTS: dict[Any, Callable[..., Part]] = {}


def operation(*packets: Any) -> Callable[[Operation], Operation]:
    """Register the translation of operations and of their in-place variants."""

    def register(function: Operation) -> Operation:
        for packet in packets:
            OPERATIONS[packet] = function
            in_place = getattr(aten, f"{packet.__name__}_", None)
            if in_place is not None:
                OPERATIONS[in_place] = function
        return function

    return register


def compute(recorder: Recorder, dtype: torch.dtype, name: str, *arguments: Any) -> int:
    """Return the node of an operation on arguments of the result's dtype."""
    operands = (recorder.operand(it, dtype) for it in arguments)
    return recorder.builder.add(wide(dtype), name, *operands)


def common(one: Any, other: Any) -> torch.dtype:
    """Return the dtype in which two arguments are compared."""
    return torch.result_type(example(one), example(other))


def _register_by_name() -> None:
    """Register operations of PyTorch that are a single operation of programs."""
    for name in FUNCTIONS:
        operation(getattr(aten, name))(functools.partial(_function, name=name))
    for name in COMPARISONS:
        operation(getattr(aten, name))(functools.partial(_comparison, name=name))
    arithmetic = {
        **{name: name for name in ("mul", "minimum", "maximum", "remainder", "fmod")},
        **{f"bitwise_{name}": name for name in ("and", "or", "xor")},
        **{f"__{name}__": name for name in ("and", "or", "xor")},
        **dict.fromkeys(("__lshift__", "bitwise_left_shift"), "shift_left"),
        **dict.fromkeys(("__rshift__", "bitwise_right_shift"), "shift_right"),
        "floor_divide": "floor_divide",
    }
    for packet, name in arithmetic.items():
        operation(getattr(aten, packet))(functools.partial(_arithmetic, name=name))
    for name in ("neg", "abs", "sign"):
        operation(getattr(aten, name))(functools.partial(_arithmetic, name=name))
    operation(aten.sgn)(functools.partial(_arithmetic, name="sign"))
    for name in ("and", "or", "xor"):
        operation(getattr(aten, f"logical_{name}"))(functools.partial(_logical, name=name))


def _function(r: Recorder, dtype: torch.dtype, x: Any, *, name: str, decimals: int = 0) -> int:
    if decimals:
        raise unsupported(f"torch.round with decimals={decimals}")
    if not dtype.is_floating_point:
        return r.operand(x, dtype)
    return compute(r, dtype, name, x)


def _comparison(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, name: str) -> int:
    operands = (r.operand(it, common(x, y)) for it in (x, y))
    return r.builder.add(torch.bool, name, *operands)


def _arithmetic(r: Recorder, dtype: torch.dtype, *arguments: Any, name: str) -> int:
    return compute(r, dtype, name, *arguments)


def _logical(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, name: str) -> int:
    return compute(r, torch.bool, name, x, y)


_register_by_name()


@operation(aten.add)
def _add(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, alpha: Any = 1) -> int:
    return _sum(r, dtype, "add", x, y, alpha)


@operation(aten.sub)
def _sub(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, alpha: Any = 1) -> int:
    return _sum(r, dtype, "sub", x, y, alpha)


@operation(aten.rsub)
def _rsub(r: Recorder, dtype: torch.dtype, x: Any, y: Any, alpha: Any = 1) -> int:
    return _sum(r, dtype, "sub", y, x, alpha)


def _sum(r: Recorder, dtype: torch.dtype, name: str, x: Any, y: Any, alpha: Any) -> int:
    if dtype == torch.bool:
        return compute(r, dtype, "or", x, y)
    first, second = r.operand(x, dtype), r.operand(y, dtype)
    if alpha != 1:
        second = r.builder.add(wide(dtype), "mul", second, r.operand(alpha, dtype))
    return r.builder.add(wide(dtype), name, first, second)


@operation(aten.div, aten.divide)
def _div(r: Recorder, dtype: torch.dtype, x: Any, y: Any, *, rounding_mode: Any = None) -> int:
    names = {None: "div", "floor": "floor_divide", "trunc": "trunc_divide"}
    return compute(r, dtype, names[rounding_mode], x, y)


@operation(aten.reciprocal)
def _reciprocal(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return _one_over(r, dtype, r.operand(x, dtype))


@operation(aten.rsqrt)
def _rsqrt(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return _one_over(r, dtype, compute(r, dtype, "sqrt", x))


@operation(aten.sigmoid)
def _sigmoid(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    exponential = add(dtype, "exp", add(dtype, "neg", r.operand(x, dtype)))
    one = r.builder.constant(1, dtype)
    return _one_over(r, dtype, add(dtype, "add", one, exponential))


def _one_over(r: Recorder, dtype: torch.dtype, node: int) -> int:
    dtype = wide(dtype)
    return r.builder.add(dtype, "div", r.builder.constant(1, dtype), node)


@operation(aten.tanh_backward)
def _tanh_backward(r: Recorder, dtype: torch.dtype, grad: Any, result: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    one, node = r.builder.constant(1, dtype), r.operand(result, dtype)
    slope = add(dtype, "sub", one, add(dtype, "mul", node, node))
    return add(dtype, "mul", r.operand(grad, dtype), slope)


@operation(aten.sigmoid_backward)
def _sigmoid_backward(r: Recorder, dtype: torch.dtype, grad: Any, result: Any) -> int:
    dtype, add = wide(dtype), r.builder.add
    one, node = r.builder.constant(1, dtype), r.operand(result, dtype)
    slope = add(dtype, "mul", node, add(dtype, "sub", one, node))
    return add(dtype, "mul", r.operand(grad, dtype), slope)


@operation(aten.threshold_backward)
def _threshold_backward(
    r: Recorder, dtype: torch.dtype, grad: Any, result: Any, threshold: Any
) -> int:
    node = r.operand(result, dtype)
    small = r.builder.add(torch.bool, "le", node, r.operand(threshold, dtype))
    return _choose(r, dtype, small, r.builder.constant(0, wide(dtype)), r.operand(grad, dtype))


@operation(aten.square)
def _square(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    node = r.operand(x, dtype)
    return r.builder.add(wide(dtype), "mul", node, node)


@operation(aten.relu)
def _relu(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    zero = r.builder.constant(0, wide(dtype))
    return r.builder.add(wide(dtype), "maximum", r.operand(x, dtype), zero)


@operation(aten.clamp, aten.clip)
def _clamp(r: Recorder, dtype: torch.dtype, x: Any, low: Any = None, high: Any = None) -> int:
    node = r.operand(x, dtype)
    for name, bound in (("maximum", low), ("minimum", high)):
        if bound is not None:
            node = r.builder.add(wide(dtype), name, node, r.operand(bound, dtype))
    return node


@operation(aten.clamp_min)
def _clamp_min(r: Recorder, dtype: torch.dtype, x: Any, low: Any) -> int:
    return _clamp(r, dtype, x, low)


@operation(aten.clamp_max)
def _clamp_max(r: Recorder, dtype: torch.dtype, x: Any, high: Any) -> int:
    return _clamp(r, dtype, x, None, high)


@operation(aten.pow)
def _pow(r: Recorder, dtype: torch.dtype, x: Any, exponent: Any) -> int:
    """Use products, roots and quotients for powers 2, 3, 0.5 and -1, and up to 8 of integers."""
    add, kind = r.builder.add, wide(dtype)
    if not isinstance(exponent, Tensor) and isinstance(x, Tensor):
        if exponent in (2, 3) or (not dtype.is_floating_point and 1 <= exponent <= 8):
            node = r.operand(x, dtype)
            times = (node for _ in range(int(exponent)))
            return functools.reduce(lambda one, other: add(kind, "mul", one, other), times)
        if exponent == 1:
            return r.operand(x, dtype)
        if exponent == 0.5:
            return compute(r, dtype, "sqrt", x)
        if exponent == -1 and dtype.is_floating_point:
            return _reciprocal(r, dtype, x)
    if not dtype.is_floating_point:
        raise unsupported("torch.pow of integers")
    return compute(r, dtype, "pow", x, exponent)


@operation(aten.where)
def _where(r: Recorder, dtype: torch.dtype, condition: Any, x: Any, y: Any) -> int:
    return _choose(
        r, dtype, r.operand(condition, torch.bool), r.operand(x, dtype), r.operand(y, dtype)
    )


@operation(aten.masked_fill)
def _masked_fill(r: Recorder, dtype: torch.dtype, x: Any, mask: Any, value: Any) -> int:
    return _where(r, dtype, mask, value, x)


def _choose(r: Recorder, dtype: torch.dtype, condition: int, x: int, y: int) -> int:
    return r.builder.add(wide(dtype), "where", condition, x, y)


@operation(aten.logical_not)
def _logical_not(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return compute(r, torch.bool, "not", x)


@operation(aten.bitwise_not)
def _bitwise_not(r: Recorder, dtype: torch.dtype, x: Any) -> int:
    return compute(r, dtype, "not", x)


@operation(aten.isnan)
def _isnan(r: Recorder, dtype: torch.dtype, x: Tensor) -> int:
    return _comparison(r, dtype, x, x, name="ne")


@operation(aten.isinf)
def _isinf(r: Recorder, dtype: torch.dtype, x: Tensor) -> int:
    if not x.dtype.is_floating_point:
        return r.builder.constant(False, torch.bool)
    size = compute(r, x.dtype, "abs", x)
    return r.builder.add(torch.bool, "eq", size, r.builder.constant(math.inf, wide(x.dtype)))


@operation(aten._to_copy, torch.ops.prims.convert_element_type)
def _cast(r: Recorder, dtype: torch.dtype, /, x: Any, *arguments: Any, **options: Any) -> int:
    """Round to 16 bits if a function casts to them, and compute in float32 again.

    Decompositions and gradients are not rounded.
    """
    node = r.operand(x, dtype)
    rounded = node if r.may_write else r.builder.add(dtype, "cast", node)
    return r.builder.add(wide(dtype), "cast", rounded)


@operation(aten.ones_like, aten.new_ones)
def _ones(r: Recorder, dtype: torch.dtype, /, *arguments: Any, **options: Any) -> int:
    return r.builder.constant(1, wide(dtype))


@operation(aten.zeros_like, aten.new_zeros, aten.empty_like, aten.new_empty)
def _zeros(r: Recorder, dtype: torch.dtype, /, *arguments: Any, **options: Any) -> int:
    return r.builder.constant(0, wide(dtype))


@operation(aten.full_like)
def _full_like(r: Recorder, dtype: torch.dtype, /, x: Any, value: Any, **options: Any) -> int:
    return r.operand(value, dtype)


@operation(aten.new_full)
def _new_full(
    r: Recorder, dtype: torch.dtype, /, x: Any, size: Any, value: Any, **options: Any
) -> int:
    return r.operand(value, dtype)


@operation(aten.fill)
def _fill(r: Recorder, dtype: torch.dtype, x: Any, value: Any) -> int:
    return r.operand(value, dtype)


@operation(
    *(aten.alias, aten.detach, aten.clone, aten.lift_fresh, aten.sum),
    *(aten.view, aten._unsafe_view, aten.reshape, aten.expand),
    *(aten.squeeze, aten.unsqueeze, aten.permute, aten.conj_physical, aten.positive),
)
def _same(r: Recorder, dtype: torch.dtype, /, x: Any, *arguments: Any, **options: Any) -> int:
    """A number is the same in another shape of one element."""
    return r.operand(x, dtype)


def part(*packets: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the part of a captured tensor that operations read."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        PARTS.update(dict.fromkeys(packets, function))
        return function

    return register


@part(aten.index)
def _index(r: Recorder, tensor: Tensor, indices: Sequence[Tensor | None]) -> Part:
    nodes = [None if it is None else r.operand(it, it.dtype) for it in indices]
    if len(nodes) > tensor.dim():
        raise unsupported(f"{len(nodes)} indices for {tensor.dim()} dimensions")
    return r.part_of(tensor).indexed(nodes)


@part(aten.select)
def _select(r: Recorder, tensor: Tensor, dim: int, index: int) -> Part:
    node = r.operand(index, torch.int64)
    return r.part_of(tensor).indexed([None] * (dim % tensor.dim()) + [node])


@part(aten.embedding)
def _embedding(r: Recorder, weight: Tensor, index: Tensor, *options: Any) -> Part:
    return _index(r, weight, [index])
