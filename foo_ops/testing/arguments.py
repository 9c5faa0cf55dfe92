"""Arguments of operators: their names and roles in the schema, and their layouts in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.compat import OpOverload, OpOverloadPacket

# ------------------------------------------------------------------------------------------ layouts

# Functions that store the same tensor in different ways.


Layout = Callable[[Tensor], Tensor]


def copy_with_layout(tensor: Tensor, device: str) -> Tensor:
    """Copy the whole storage to a device, seen with the tensor's own strides and offset.

    Example:
        >>> copy = copy_with_layout(torch.ones(4, 6)[1:, ::2], "foo")
        >>> copy.stride(), copy.storage_offset()
        ((6, 2), 6)
    """
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def junk(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Return elements that must not be read: NaN, the largest integer, or True."""
    value: float = math.nan
    if tensor.dtype == torch.bool:
        value = True
    elif not tensor.is_floating_point() and not tensor.is_complex():
        value = torch.iinfo(tensor.dtype).max
    return torch.full(tuple(shape), value, dtype=tensor.dtype, device=tensor.device)


def hint_at_junk(values: Tensor) -> str:
    """Say how many of the wrong elements are junk, and what that means."""
    nothing = junk(values, ())
    is_junk = values.isnan() if nothing.isnan() else values == nothing
    count = int(is_junk.sum())
    if count == 0 or values.dtype == torch.bool:
        return ""
    return (
        f". {count} of them are {nothing.item()}, which fills fresh memory during this check: the "
        "kernel leaves elements unwritten, or reads fresh memory, or reads outside of its input"
    )


def reversed_dimensions(tensor: Tensor) -> Tensor:
    """Make the first dimension dense in memory, and give the last the largest stride."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def every_second(tensor: Tensor) -> Tensor:
    """Give the last dimension a stride of 2."""
    return torch.stack((tensor, junk(tensor, tensor.shape)), -1)[..., 0]


def inside_padding(tensor: Tensor) -> Tensor:
    """Slice a larger tensor in every dimension, so that no two dimensions can be merged."""
    larger = junk(tensor, [size + 3 for size in tensor.shape])
    place = tuple(slice(1, 1 + size) for size in tensor.shape)
    larger[place] = tensor
    return larger[place]


def at_odd_offset(tensor: Tensor) -> Tensor:
    """Align the first element to nothing but its own size."""
    flat = torch.cat((junk(tensor, [3]), tensor.flatten()))
    return flat[3:].view(tensor.shape)


def second_and_third_exchanged(tensor: Tensor) -> Tensor:
    """Store (batch, length, heads, ...), and show it as (batch, heads, length, ...)."""
    if tensor.dim() < 3:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def expanded(tensor: Tensor) -> Tensor:
    """Repeat the first slice of each dimension but the last, with stride 0."""
    first = tensor[tuple(slice(0, 1) for _ in tensor.shape[:-1])]
    return first.expand(tensor.shape) if tensor.numel() > 0 else tensor


LAYOUTS = (
    reversed_dimensions,
    every_second,
    inside_padding,
    at_odd_offset,
    second_and_third_exchanged,
    expanded,
)


# ------------------------------------------------------------------------------------------- schema


Operator = OpOverload


def overload(operator: Any) -> Operator:
    """Return the given overload, the default one of a packet, or that of a CustomOpDef.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(operator, torch.library.CustomOpDef):
        operator = operator._opoverload
    if isinstance(operator, OpOverloadPacket):
        operator = operator.default
    if not isinstance(operator, Operator):
        raise TypeError(
            "OpSpec: operator must be an operator such as torch.ops.mylib.f, or what "
            f"torch.library.custom_op returned, got {type(operator).__name__}"
        )
    return operator


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in tensors_in(value)]


def with_each_tensor(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Replace each tensor in lists, tuples and dicts by the result of a function.

    For speed: torch's pytree took an eighth of the time of attention's checks.
    """
    if isinstance(values, Tensor):
        return function(values)
    if isinstance(values, Mapping):
        return {name: with_each_tensor(function, value) for name, value in values.items()}
    if isinstance(values, (list, tuple)):
        return type(values)(with_each_tensor(function, value) for value in values)
    return values


def named_tensors(
    operator: Operator, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a call, named by the schema: ``input``, ``tensors[1]``."""
    for argument, value in bound(operator, inputs, keywords):
        if isinstance(value, Tensor):
            yield argument.name, value
        elif isinstance(value, (list, tuple)):
            for index, element in enumerate(value):
                if isinstance(element, Tensor):
                    yield f"{argument.name}[{index}]", element


def written_tensors(
    operator: Operator, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> list[Tensor]:
    """Return the tensors that the schema declares as written."""
    arguments = bound(operator, inputs, keywords)
    return [
        tensor for argument, value in arguments if writes(argument) for tensor in tensors_in(value)
    ]


def bound(
    operator: Operator, inputs: Sequence[Any], keywords: Mapping[str, Any]
) -> Iterator[tuple[Any, Any]]:
    """Yield the arguments of a call, each with its entry in the schema."""
    arguments = operator._schema.arguments
    yield from zip(arguments, inputs)
    for argument in arguments[len(inputs) :]:
        if argument.name in keywords:
            yield argument, keywords[argument.name]


def writes(argument: Any) -> bool:
    """Whether an argument, or a return, is declared as ``Tensor(a!)``."""
    return argument.alias_info is not None and argument.alias_info.is_write


def out_names(operator: Operator, functional: Operator | None) -> list[str]:
    """Return the names of the arguments that only the out variant has."""
    if functional is None:
        return []
    known = {argument.name for argument in functional._schema.arguments}
    names = (argument.name for argument in operator._schema.arguments)
    return [name for name in names if name not in known]


def functional_form(operator: Operator, functional: Operator | None) -> Callable[..., Any]:
    """Return a functional form of the operator, which writes no argument and can be compiled.

    It writes copies with the same strides, and returns them after the operator's other results. For
    an out variant it makes the out arguments, like the results of ``functional``.
    """
    schema = operator._schema
    if not schema.is_mutable:
        return operator
    written = {argument.name for argument in schema.arguments if writes(argument)}
    names = [argument.name for argument in schema.arguments]
    outs = out_names(operator, functional)
    fresh = [not writes(result) for result in schema.returns]

    def function(*inputs: Any, **keywords: Any) -> tuple[Any, ...]:
        if functional is not None:
            keywords |= dict(zip(outs, map(unwritten, as_tuple(functional(*inputs, **keywords)))))
        copied = [copies(value) if name in written else value for name, value in zip(names, inputs)]
        keywords = {
            name: copies(value) if name in written and name not in outs else value
            for name, value in keywords.items()
        }
        results = as_tuple(operator(*copied, **keywords))
        returned = [result for result, is_fresh in zip(results, fresh) if is_fresh]
        arguments = dict(zip(names, copied)) | keywords
        return (*returned, *(arguments[name] for name in names if name in written))

    return function


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Return an operator's result as a tuple."""
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)


def unwritten(tensor: Tensor) -> Tensor:
    """Return a tensor for results like this one, filled with junk."""
    return junk(tensor, tensor.shape)


def copies(value: Any) -> Any:
    """Copy a tensor or a list of them with their strides, as recorded by autograd."""
    if isinstance(value, (list, tuple)):
        return [copies(element) for element in value]
    if not isinstance(value, Tensor):
        return value
    if value.is_contiguous():
        return value.clone()
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return empty.copy_(value)
