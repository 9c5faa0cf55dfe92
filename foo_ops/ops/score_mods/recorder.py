"""Record what a function computes for one score, while it runs on numbers without values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from foo_ops.kernels.flex.program import DTYPES
from foo_ops.ops.score_mods.builder import Builder, name_of

# Numbers that torch.compile leaves open, such as lengths.
SYMBOLS = (torch.SymInt, torch.SymFloat)
CREATED = (torch.ops.aten.lift_fresh, torch.ops.aten.lift_fresh_copy, torch.ops.aten.lift)


class RefusalError(Exception):
    """What a function does that no program can say: what it must do, and what came."""

    def __init__(self, must: str, got: str, kind: type[Exception] = NotImplementedError) -> None:
        super().__init__(must, got)
        self.must, self.got, self.kind = must, got, kind


def unsupported(got: str) -> RefusalError:
    """Return the refusal of an operation."""
    return RefusalError("must be made of operations on single numbers", got)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a captured tensor: the indices that are known, and None for the dimensions left."""

    captured: int
    indices: tuple[int | None, ...]

    def indexed(self, indices: Sequence[int | None]) -> Part:
        """Return the part with indices for its dimensions, from the first one on."""
        new = iter(indices)
        return Part(self.captured, tuple(next(new, None) if i is None else i for i in self.indices))


class Number(Tensor):
    """A tensor without values, on any device, that stands for a node or for a part.

    PyTorch's own FakeTensor would do, at three times the cost, and imports for a second.
    """

    value: int | Part
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls: type[Number],
        size: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        value: int | Part,
        requires_grad: bool = False,
    ) -> Number:
        """Make one that stands for a value."""
        number: Number = Tensor._make_wrapper_subclass(
            cls, size, dtype=dtype, device=device, requires_grad=requires_grad
        )
        number.value = value
        return number

    @classmethod
    def __torch_dispatch__(cls, func: Any, *rest: Any) -> Any:
        """Refuse what happens outside of the trace."""
        raise RuntimeError(f"{func} was called on a number that only a trace can compute with")

    def __repr__(self) -> str:  # type: ignore[override]
        """Tell a function that prints what it is given."""
        return f"<number without a value, {self.dtype}>"


@dataclasses.dataclass(frozen=True)
class Load:
    """A number that was read from a captured tensor."""

    tensor: Tensor
    node: int


@dataclasses.dataclass(frozen=True)
class Step:
    """An operation on captured tensors alone, and what it made: all tensors by their numbers."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[int, ...]


class Place(int):
    """The number of a tensor among a step's arguments."""


class Recorder(TorchDispatchMode):
    """Turn each operation on a number without a value into a node of a program.

    Operations on other tensors are computed as ever. What they make of captured tensors is captured
    in their place, and remembered as `steps`. A tensor that the function makes of nothing else is a
    number, or captured if it has more than one.
    """

    def __init__(self, builder: Builder, device: torch.device) -> None:
        super().__init__()
        self.builder, self._device = builder, device
        self._excluded = torch._C._dispatch_tls_local_exclude_set()
        self.captured: list[Tensor] = []
        self.loads: list[Load] = []
        self.steps: list[Step] = []
        self.reads_values = False
        # Formulas of gradients, and what operations are made of, write in what they made.
        self.may_write = False
        self.created: dict[int, Tensor] = {}
        self._nodes: dict[int, int] = {}
        self._places: dict[int, int] = {}
        self._loaded: dict[int, int] = {}
        self._stand_ins: dict[int, Tensor] = {}
        self._kept: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Do without what would import Dynamo: 0.6 s of the first trace."""
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
        from foo_ops.ops.score_mods.operations import OPERATIONS, PARTS

        handler = OPERATIONS.get(func.overloadpacket)
        part = PARTS.get(func.overloadpacket)
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            raise RefusalError(
                "must not decide in Python by a value (torch.where decides for each score)",
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
        """Record another operation by those that PyTorch says it is made of."""
        from torch._decomp import decomposition_table

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
        """Call a function as around the trace, where torch.func and torch.export may be."""
        included = torch._C._dispatch_tls_local_include_set()
        keys = torch._C._ForceDispatchKeyGuard(included, self._excluded)
        with keys, torch._C._DisableAutocast():
            return func(*args, **kwargs)

    def input(self, name: str, dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
        """Return a number that is given to the program."""
        node = self.builder.add(dtype, "input", name=name)
        return Number((), dtype, self._device, node, requires_grad)

    def stand_in(self, tensor: Tensor) -> Tensor:
        """Return what a trace computes with in the place of a tensor that it captures.

        The tensor itself may be wrapped by torch.func, or have a tangent, which is for the operator
        to see. All floating-point ones have gradients, since a program is for all calls alike.
        """
        if isinstance(tensor, Number) or (id(tensor) in self.created and tensor.dim() == 0):
            return tensor
        if id(tensor) not in self._stand_ins:
            has_gradient = torch.is_grad_enabled() and tensor.dtype.is_floating_point
            part = self.part_of(tensor)
            leaf = Number(tensor.shape, tensor.dtype, self._device, part, has_gradient)
            with self:
                # No leaf, so that autograd leaves it to us to refuse what writes in place.
                self._stand_ins[id(tensor)] = torch.ops.aten.index(leaf, [])
        return self._stand_ins[id(tensor)]

    def part_of(self, tensor: Tensor) -> Part:
        """Return the part of a captured tensor that a tensor is."""
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
            # Only what is captured is a different number at each call of what was compiled.
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
        """Return the node for a number that the function has made a tensor."""
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
    """Return a number on the CPU for one without a value: what comes of it tells the kind."""
    if isinstance(value, Tensor):
        return torch.ones(value.shape, dtype=value.dtype)
    if isinstance(value, SYMBOLS):
        return 1 if isinstance(value, torch.SymInt) else 1.0
    return torch.device("cpu") if isinstance(value, torch.device) else value


def tensor_of(value: Any, device: torch.device) -> Tensor:
    """Return a number in a tensor; one that PyTorch leaves open must come into it by a product."""
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
