"""Make the fake kernels of elementwise operators, which lay out results as TensorIterator does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.library.operators import Parameter
from foo_ops.library.symbols import Sizes, have_sizes, is_known

CPU = torch.device("cpu")


def make_fake(
    operator: torch._ops.OpOverload,
    parameters: Sequence[Parameter],
    elementwise: Any,
    gradients_of: Sequence[str],
) -> Callable[..., Any]:
    """Make the fake kernel of an operator.

    Args:
        operator: the operator.
        parameters: its arguments.
        elementwise: its launcher.
        gradients_of: for each result the argument without which it is missing, or "".
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {p.name: argument for p, argument in zip(parameters, args)} | kwargs
        tensors = [given.get(p.name) if p.is_tensor else None for p in parameters]
        there = [(p, tensor) for p, tensor in zip(parameters, tensors) if tensor is not None]
        inputs = [tensor for p, tensor in there if p.role != "out"]
        outputs = [tensor for p, tensor in there if p.role != "read"]
        types = elementwise.result_types([given.get(p.name) for p in parameters])
        if outputs:
            shape = _broadcast_shape(inputs)
            elementwise.check_targets(tensors, shape)
            results = [
                output if have_sizes(output.shape, shape) else output.resize_(shape)
                for output in outputs
            ]
        else:
            (shape, strides), device = _layout(inputs), _common_device(inputs)
            results = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device) for dtype in types
            ]
            for position, name in enumerate(gradients_of):
                if name and given.get(name) is None:
                    results[position] = None
        count = len(operator._schema.returns)
        return results[0] if count == 1 else tuple(results[:count]) or None

    return fake


def _common_device(inputs: Sequence[Tensor]) -> torch.device:
    """Find the device as TensorIterator does: a 0-d tensor on cpu goes with any."""
    return next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), CPU)


def _broadcast_shape(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    # Imported here, since torch._refs takes 0.1 s, and a fake kernel runs under compilation.
    from torch._refs import _broadcast_shapes

    return tuple(_broadcast_shapes(*(tensor.shape for tensor in inputs)))


def _layout(inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return shape and strides of a result, as TensorIterator chooses them."""
    from torch._prims_common import (
        compute_elementwise_output_strides,
        is_contiguous_or_false,
        make_contiguous_strides_for,
    )

    shape = _broadcast_shape(inputs)
    # TensorIterator's own first question; it tells in empty tensors and dimensions of size 1.
    if all(_has_shape(tensor, shape) and is_contiguous_or_false(tensor) for tensor in inputs):
        return shape, make_contiguous_strides_for(shape)
    expanded = (tensor.expand(shape) for tensor in inputs)
    return shape, compute_elementwise_output_strides(*expanded)


def _has_shape(tensor: Tensor, shape: Sizes) -> bool:
    pairs = zip(tensor.shape, shape)
    return tensor.dim() == len(shape) and all(is_known(size == other) for size, other in pairs)
