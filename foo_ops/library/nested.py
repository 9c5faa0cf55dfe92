"""Let operators of rows take nested tensors: their kernels get the rows of all parts at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor
from torch.nested._internal.ops import extract_kwargs
from torch.utils import _pytree as pytree

from foo_ops.library.operators import find, library_of

KEY = "AutogradNestedTensor"


def register_nested_rows(
    name: str,
    *rows: str,
    elementwise: bool = False,
    lib: torch.library.Library | None = None,
) -> None:
    """Let an operator of any number of leading dimensions take jagged nested tensors, in one call.

    Without this an operator that has a kernel of Numba refuses nested tensors.

    Args:
        name: the operator, whose results have the leading dimensions, too.
        rows: names the arguments that have them. These are nested all or none, in parts of the
            same lengths.
        elementwise: whether each element is a row of its own. Without it, parts that are side by
            side in the last dimension are refused.
        lib: the registration ends with it; without it, with the process.

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
    names = [argument.name for argument in operator._schema.arguments]
    short = name.partition("::")[2]

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        given = dict(zip(names, inputs)) | keywords
        for argument, value in given.items():
            if isinstance(value, Tensor) and value.is_nested:
                _require_jagged(short, argument, value, argument in rows, elementwise)
        nested = _compact(short, {n: given[n] for n in rows if isinstance(given.get(n), Tensor)})
        given |= {n: _Values.apply(it) for n, it in nested.items()}
        results = operator(*list(given.values())[: len(inputs)], **{n: given[n] for n in keywords})
        parts = extract_kwargs(next(iter(nested.values())))
        return pytree.tree_map_only(Tensor, lambda it: _Nested.apply(it, parts), results)

    library_of(name, lib).impl(short, kernel, KEY)


def _require_jagged(
    operator: str, argument: str, tensor: Tensor, is_row: bool, elementwise: bool
) -> None:
    if not is_row:
        raise NotImplementedError(
            f"{operator}: {argument} must be a dense tensor, got a nested one"
        )
    if not isinstance(tensor, NestedTensor):
        raise NotImplementedError(
            f"{operator}: {argument} must be dense or nested with layout torch.jagged, got a "
            f"nested tensor with layout {tensor.layout}"
        )
    if tensor._ragged_idx == tensor.dim() - 1 and not elementwise:
        raise NotImplementedError(
            f"{operator}: {argument} must not have its parts side by side in the last dimension, "
            f"got shape {list(tensor.shape)}"
        )


def _compact(operator: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Require tensors of the same parts, and leave out what is in memory between these.

    That is no row: it could be NaN, in the gradients of weights, too.
    """
    first, parts = next(iter(tensors.items()))
    for argument, tensor in tensors.items():
        if _lengths_of(parts) != _lengths_of(tensor):
            raise ValueError(
                f"{operator}: {argument} must be nested in the same parts as {first}, got shapes "
                f"{list(tensor.shape)} and {list(parts.shape)}"
            )
    if not isinstance(parts, NestedTensor) or parts.lengths() is None:
        return tensors
    return {n: it.contiguous() for n, it in tensors.items()}


def _lengths_of(tensor: Tensor) -> torch.Size | None:
    """Say how long parts are: sizes of one symbol are those of the same offsets."""
    return tensor.shape[: tensor._ragged_idx + 1] if isinstance(tensor, NestedTensor) else None


class _Values(torch.autograd.Function):
    """The rows of all parts. NestedTensor.values() can't be differentiated three times."""

    @staticmethod
    def forward(nested: NestedTensor) -> Tensor:
        return nested._values.detach()

    @staticmethod
    def setup_context(context: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        context.parts = extract_kwargs(inputs[0])

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        return _Nested.apply(grad, context.parts)


class _Nested(torch.autograd.Function):
    """Rows in the parts of another tensor, to which the result can be added.

    torch.nested.nested_tensor_from_jagged can be differentiated once, and not be traced.
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
