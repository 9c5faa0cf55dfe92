"""Let operators of rows take nested tensors: their kernels get the rows of all parts at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.compat import NestedTensor, OpOverload, pytree
from foo_ops.library.operators import (
    find,
    keep,
    library_of,
    own_library,
    short_name,
    tensors_in,
)

KEY = "AutogradNestedTensor"


def register_nested_rows(
    name: str,
    *rows: str,
    elementwise: bool = False,
    lib: torch.library.Library | None = None,
) -> None:
    """Let an operator of any number of leading dimensions take jagged nested tensors, in one call.

    Without this, an operator with a Numba kernel refuses nested tensors.

    Args:
        name: the operator, whose results have the leading dimensions, too.
        rows: the arguments with leading dimensions. All of them are nested or none, in parts of the
            same lengths.
        elementwise: whether each element is a row of its own. If not, parts that are side by side
            in the last dimension are refused.
        lib: the registration ends with this library; by default, with the process.

    Example:
        >>> foo_ops.library.define("mylib::half", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::half", "cpu", foo_ops.library.elementwise_kernel(lambda x: x / 2)
        ... )
        >>> foo_ops.library.register_nested_rows("mylib::half", "input", elementwise=True)
        >>> parts = [torch.tensor([[2.0]]), torch.tensor([[4.0], [6.0]])]
        >>> nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
        >>> torch.ops.mylib.half(nested).values()
        tensor([[1.],
                [2.],
                [3.]])
    """
    operator = find(name)
    name = operator.name()
    names = [argument.name for argument in operator._schema.arguments]
    for row in rows:
        if row not in names:
            raise ValueError(f"{name}: rows must be among the arguments {names}, got {row!r}")

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        given = dict(zip(names, inputs)) | keywords
        require_dense(operator, {n: it for n, it in given.items() if n not in rows})
        tensors = {n: given[n] for n in rows if isinstance(given.get(n), Tensor)}
        first = _require_same_parts(short_name(operator), tensors, elementwise)
        given |= {n: _rows_of(it) for n, it in tensors.items()}
        results = operator(*list(given.values())[: len(inputs)], **{n: given[n] for n in keywords})
        parts = _parts_of(first)
        return pytree.tree_map_only(Tensor, lambda it: _Nested.apply(it, parts), results)

    library_of(name, lib).impl(name.partition("::")[2], kernel, KEY)
    # In inference mode, tensors reach the kernel by way of the refusal.
    keep(_C.refuse_nested_tensors(name), own_library(name, lib))


def require_dense(operator: OpOverload, arguments: dict[str, Any]) -> None:
    for argument, value in arguments.items():
        if any(tensor.is_nested for tensor in tensors_in(value)):
            raise NotImplementedError(
                f"{short_name(operator)}: {argument} must be a dense tensor, got a nested one"
            )


def _require_same_parts(
    operator: str, tensors: dict[str, Tensor], elementwise: bool
) -> NestedTensor:
    """Return the first tensor; all must have its parts."""
    for argument, tensor in tensors.items():
        if tensor.is_nested:
            _require_jagged(operator, argument, tensor, elementwise)
    first, *others = tensors
    for argument in others:
        if _places_of(tensors[first]) != _places_of(tensors[argument]):
            raise ValueError(
                f"{operator}: {argument} must be ragged like {first}, got shapes "
                f"{list(tensors[argument].shape)} and {list(tensors[first].shape)}"
            )
    nested = tensors[first]
    assert isinstance(nested, NestedTensor)
    return nested


def _require_jagged(operator: str, argument: str, tensor: Tensor, elementwise: bool) -> None:
    if not isinstance(tensor, NestedTensor):
        raise NotImplementedError(
            f"{operator}: {argument} must be dense or nested with layout torch.jagged, got a "
            f"nested tensor with layout {tensor.layout}"
        )
    if tensor._ragged_idx == tensor.dim() - 1 and not elementwise:
        raise NotImplementedError(
            f"{operator}: {argument} must not be ragged in the last dimension, "
            f"got shape {list(tensor.shape)}"
        )


def _places_of(tensor: Tensor) -> Any:
    """Return a key for the places of parts: an equal symbol means equal offsets or lengths."""
    if not isinstance(tensor, NestedTensor):
        return None
    where = None if tensor.lengths() is None else id(tensor.offsets())
    return tensor.shape[: tensor._ragged_idx + 1], where


def _parts_of(nested: NestedTensor) -> dict[str, Any]:
    """Return the arguments that make a nested tensor of the same parts, besides its values."""
    return {
        "offsets": nested.offsets(),
        "lengths": nested.lengths(),
        "_metadata_cache": nested._metadata_cache,
        "_ragged_idx": nested._ragged_idx,
    }


def _rows_of(nested: NestedTensor) -> Tensor:
    """Return the rows of all parts, with zeros in the gaps between them.

    A gap could contain NaN, and then gradients of weights would be NaN, too.
    """
    rows: Tensor = _Values.apply(nested)
    lengths, offsets, dimension = nested.lengths(), nested.offsets(), nested._ragged_idx - 1
    if lengths is None:
        return rows
    starts = offsets[: lengths.shape[0]]
    ones = torch.ones_like(starts)
    changes = starts.new_zeros(rows.shape[dimension] + 1)
    changes = changes.index_add(0, starts, ones).index_add(0, starts + lengths, -ones)
    is_row = changes.cumsum(0)[:-1] > 0
    shape = (-1, *[1] * (rows.dim() - dimension - 1))
    return torch.where(is_row.view(shape), rows, 0)


class _Values(torch.autograd.Function):
    """The rows of all parts. NestedTensor.values() can't be differentiated three times."""

    @staticmethod
    def forward(nested: NestedTensor) -> Tensor:
        return nested._values.detach()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[NestedTensor], output: Tensor) -> None:
        context.parts = _parts_of(inputs[0])

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return _Nested.apply(grad, context.parts)


class _Nested(torch.autograd.Function):
    """Rows in the parts of another tensor, to which the result can be added.

    torch.nested.nested_tensor_from_jagged can be differentiated only once, and cannot be traced.
    """

    @staticmethod
    def forward(values: Tensor, parts: dict[str, Any]) -> Tensor:
        return NestedTensor(values.detach(), **parts)

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Values.apply(grad), None
