"""Run opcheck on every device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foo_ops.compat import (
    OpOverload,
    OpOverloadPacket,
    get_autograd_fallback_mode,
    set_autograd_fallback_mode,
)
from foo_ops.library.operators import tensors_in

OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck(
    op: OpOverload | OpOverloadPacket | torch.library.CustomOpDef,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    test_utils: str | Sequence[str] = OPCHECKS,
    raise_exception: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, Any]:
    """Run torch.library.opcheck, on device foo too, and check that gradients are recorded.

    torch's ``test_autograd_registration`` refuses devices other than cpu, cuda and xpu, and only
    checks that the autograd key has a kernel. Here the operator is also called, on any device: if
    an input requires a gradient, an output must, too, and through a formula.

    Example:
        >>> input = torch.randn(3, device="foo", requires_grad=True)
        >>> set(foo_ops.library.opcheck(torch.ops.foo.abs, (input,)).values())
        {'SUCCESS'}
    """
    # Imported here, since it brings in much that only tests need.
    from foo_ops.compat import OpCheckError

    op = _overload(op)
    names = (test_utils,) if isinstance(test_utils, str) else tuple(test_utils)
    if names == ("ALL",):
        names = OPCHECKS
    tensors = tensors_in((args, kwargs))
    autograd = "test_autograd_registration"
    refused = any(tensor.device.type == "foo" for tensor in tensors)
    of_torch = tuple(name for name in names if not (name == autograd and refused))
    results: dict[str, Any] = torch.library.opcheck(
        op, args, kwargs, test_utils=of_torch, raise_exception=raise_exception, rtol=rtol, atol=atol
    )
    if autograd in names and results.get(autograd, "SUCCESS") == "SUCCESS":
        results[autograd] = "SUCCESS"
        needed = any(tensor.requires_grad for tensor in tensors)
        if needed and not _records_gradient(op, args, kwargs or {}):
            error = OpCheckError(
                f"opcheck({op.name()}, ...): {autograd} failed: an input requires a gradient, "
                "but no output does"
            )
            if raise_exception:
                raise error
            results[autograd] = error
    return results


def _overload(
    op: OpOverload | OpOverloadPacket | torch.library.CustomOpDef,
) -> OpOverload:
    """Return the overload that a name calls: operators of numba_op have ``out``, too."""
    if isinstance(op, torch.library.CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverloadPacket):
        if "default" in op.overloads():
            return op.default
        from foo_ops.compat import unique_overload

        return unique_overload(op)
    return op


def _records_gradient(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    # In this mode an operator without a formula gives outputs that require no gradient.
    mode = get_autograd_fallback_mode()
    set_autograd_fallback_mode("nothing")
    try:
        outputs = op(*args, **kwargs)
    finally:
        set_autograd_fallback_mode(mode)
    return any(output.requires_grad for output in tensors_in(outputs))
