"""Check what functions in Python return for an operator: PyTorch takes their number on trust.

Beyond the returns of a schema it reads memory that belongs to others, and results that are missing
are whatever lies on its stack.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.library.operators import find


def counted(
    op: str | torch._ops.OpOverload | torch.library.CustomOpDef, what: str, function: Any
) -> Any:
    """Return a function that raises TypeError where its results are not those of the schema.

    Args:
        op: the operator. One of torch.library.custom_op counts for itself.
        what: the function's part, such as "fake kernel".
        function: as it is registered for the operator. An operator, or torch's fallthrough, is
            returned as it is.
    """
    is_operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    is_ours = callable(function) and function is not torch.library.fallthrough_kernel
    if isinstance(op, torch.library.CustomOpDef) or is_operator or not is_ours:
        return function

    @functools.wraps(function)
    def counting(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # A kernel may be registered before its operator is defined.
        operator = find(op)
        wanted = _wanted(operator._schema.returns, result)
        if wanted is None:
            return result
        raise TypeError(f"{operator.name()}: its {what} must return {wanted}, got {_words(result)}")

    return counting


def _wanted(declared: Sequence[torch._C.Argument], result: Any) -> str | None:
    """Say what the result should be, or None where it is so."""
    if len(declared) == 1:
        # There are no others for which the error of PyTorch would not do.
        is_right = str(declared[0].type) != "Tensor" or _may_be_tensor(result)
        return None if is_right else "a Tensor"
    if not declared:
        return None if result is None else "None"
    is_right = (
        isinstance(result, (tuple, list))
        and len(result) == len(declared)
        and all(
            str(it.type) != "Tensor" or _may_be_tensor(part) for it, part in zip(declared, result)
        )
    )
    of_tensors = all(str(it.type) == "Tensor" for it in declared)
    return None if is_right else f"{len(declared)} {'Tensors' if of_tensors else 'results'}"


def _may_be_tensor(value: Any) -> bool:
    # None stands for a tensor that is not defined.
    return value is None or isinstance(value, Tensor)


def _words(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"{len(result)} ({', '.join(map(_word, result))})" if result else "0"
    return _word(result)


def _word(value: Any) -> str:
    return "None" if value is None else type(value).__name__
