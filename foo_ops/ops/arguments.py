"""Check arguments in fake kernels, in the same words for every operator."""

from __future__ import annotations

import torch
from torch import Tensor

from foo_ops.compat import is_functorch_wrapped_tensor, len_dispatch_stack
from foo_ops.library.operators import FLOATING, Sizes, dtype_name, have_sizes


def require_int64(operator: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int64:
            raise TypeError(f"{operator}: {name} must be int64, got {dtype_name(tensor.dtype)}")


def require_floating(operator: str, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None or tensor.dtype in FLOATING:
            continue
        # Formats of 8 bits and less are for storage, and kernels read none.
        least = " of at least 16 bits" if tensor.is_floating_point() else ""
        raise TypeError(
            f"{operator}: {name} must be floating-point{least}, got {dtype_name(tensor.dtype)}"
        )


def require_compute_type(operator: str, of: str, like: Tensor, **tensors: Tensor) -> None:
    """Require float64 exactly when ``like`` is float64."""
    is_double = like.dtype == torch.float64
    allowed = "float64" if is_double else "float16, bfloat16 or float32"
    for name, tensor in tensors.items():
        if (tensor.dtype == torch.float64) != is_double:
            raise TypeError(
                f"{operator}: {name} must be {allowed} where {of} is {dtype_name(like.dtype)}, "
                f"got {dtype_name(tensor.dtype)}"
            )


def require_sums(operator: str, of: str, like: Tensor, **tensors: Tensor | None) -> None:
    """Require the dtype in which sums of ``like``, the argument called ``of``, are kept."""
    wanted = compute_type(like.dtype)
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype != wanted:
            raise TypeError(
                f"{operator}: {name} must be {dtype_name(wanted)} where {of} is "
                f"{dtype_name(like.dtype)}, got {dtype_name(tensor.dtype)}"
            )


def require_rows(operator: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() == 0:
            raise ValueError(f"{operator}: {name} must have at least 1 dimension, got 0")


def require_shape(operator: str, name: str, tensor: Tensor, shape: Sizes, reason: str) -> None:
    """Require a shape; ``reason`` names its source, as in "as input has"."""
    if not have_sizes(tensor.shape, shape):
        raise ValueError(
            f"{operator}: {name} must have shape {list(shape)} {reason}, got {list(tensor.shape)}"
        )


def require_like(operator: str, name: str, tensor: Tensor, of: str, like: Tensor) -> None:
    """Require the shape and the dtype of ``like``, the argument called ``of``."""
    require_shape(operator, name, tensor, like.shape, f"as {of} has")
    if tensor.dtype != like.dtype:
        raise TypeError(
            f"{operator}: {name} must be {dtype_name(like.dtype)} as {of} is, "
            f"got {dtype_name(tensor.dtype)}"
        )


def require_device(operator: str, **tensors: Tensor | None) -> None:
    """Require one device for all. Kernels check that too, in the same words."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    first, *rest = given
    for name in rest:
        if given[name].device != given[first].device:
            raise ValueError(
                f"{operator}: {name} must be on {given[first].device} as {first} is, "
                f"got {given[name].device}"
            )


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums are kept: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_elements(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read: not if it is fake or traced, nor under torch.vmap."""
    is_wrapped = is_functorch_wrapped_tensor(tensor)
    is_traced = len_dispatch_stack() > 0
    return type(tensor) is Tensor and not tensor.is_meta and not is_wrapped and not is_traced
