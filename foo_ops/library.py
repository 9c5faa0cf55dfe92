"""Define operators and register their kernels: torch.library, extended to kernels of Numba.

``define``, ``register_fake`` and ``opcheck`` are torch.library's names with its semantics; opcheck
also works on foo. A kernel registered here is called by the C++ dispatcher through its address,
with no Python on the way.

Example:
    >>> import torch
    >>> import foo_ops
    >>> torch.ops.foo.abs(torch.tensor([-1.0, 2.0]))
    tensor([1., 2.])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import define, register_fake, register_vmap

from foo_ops import _C
from foo_ops._after_import import after_import

__all__ = [
    "define",
    "opcheck",
    "register_autocast",
    "register_autograd",
    "register_elementwise",
    "register_fake",
    "register_flops",
    "register_variant_autograd",
    "register_vmap",
    "register_vmap_loop",
    "vmap_by_loop",
]

_fragment = torch.library.Library("foo", "FRAGMENT")

ResultTypes = Mapping[torch.dtype, torch.dtype]


def register_autograd(
    name: str, backward: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
) -> None:
    """As torch.library.register_autograd, but calls that need no gradient do not enter Python.

    Args:
        name: the operator, such as ``"foo::abs"``; its schema must be functional.
        backward: ``backward(ctx, *gradients)``, returns a gradient or None for each input.
        setup_context: ``setup_context(ctx, inputs, output)``, saves what backward needs; with
            keyword-only arguments in the schema also ``keyword_only_inputs``.
    """
    torch.library.register_autograd(name, backward, setup_context=setup_context)
    _C.register_autograd_shortcut(name)


def register_variant_autograd(name: str) -> None:
    """Autograd for the in-place or out variant of an operator that has a formula.

    In place, ``f_(a)`` is differentiated as ``a.copy_(f(a.clone()))``, which handles views and
    versions. An out variant refuses tensors that need a gradient, as torch's own do.
    """
    operator = _find(name)
    in_place = operator._overloadname == "default"
    packet = operator._overloadpacket

    def formula(keyset: torch._C.DispatchKeySet, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        if in_place:
            functional = _find(name.removesuffix("_"))
            # The formula may keep its input, which is about to be overwritten.
            return inputs[0].copy_(functional(inputs[0].clone(), *inputs[1:]))
        raise RuntimeError(
            f"{packet.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )

    _fragment.impl(name.partition("::")[2], formula, "Autograd", with_keyset=True)
    _C.register_autograd_shortcut(name)


def register_autocast(name: str) -> None:
    """Under torch.autocast, floating-point tensors but float64 are cast to autocast's dtype.

    As for torch's own matrix products, on cpu and foo.
    """
    operator = _find(name)
    for device_type, key in (("cpu", "AutocastCPU"), ("foo", "AutocastPrivateUse1")):
        _fragment.impl(name.partition("::")[2], _autocast_kernel(operator, device_type, key), key)


def _autocast_kernel(
    operator: torch._ops.OpOverload, device_type: str, key: str
) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))

    def cast(argument: Any) -> Any:
        if (
            isinstance(argument, Tensor)
            and argument.is_floating_point()
            and argument.dtype != torch.float64
        ):
            return argument.to(torch.get_autocast_dtype(device_type))
        return argument

    def kernel(*inputs: Any, **keywords: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            return operator(*map(cast, inputs), **keywords)

    return kernel


def register_vmap_loop(name: str) -> None:
    """Map an operator by a call for each element of the mapped dimension."""
    operator = _find(name)

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any, **keywords: Any) -> Any:
        return vmap_by_loop(operator, info, in_dims, *inputs, **keywords)

    register_vmap(name, vmap)


def vmap_by_loop(
    operator: torch._ops.OpOverload,
    info: Any,
    in_dims: tuple[int | None, ...],
    *inputs: Any,
    **keywords: Any,
) -> tuple[Any, Any]:
    """What a function for register_vmap returns: the results, stacked, and where."""
    if info.batch_size == 0:
        return _mapped_over_nothing(operator, in_dims, inputs, keywords)
    calls = []
    for index in range(info.batch_size):
        chosen = (
            argument if in_dim is None else argument.select(in_dim, index)
            for argument, in_dim in zip(inputs, in_dims)
        )
        calls.append(operator(*chosen, **keywords))
    if isinstance(calls[0], Tensor):
        return torch.stack(calls), 0
    return tuple(map(torch.stack, zip(*calls))), (0,) * len(calls[0])


def _mapped_over_nothing(
    operator: torch._ops.OpOverload,
    in_dims: tuple[int | None, ...],
    inputs: tuple[Any, ...],
    keywords: dict[str, Any],
) -> tuple[Any, Any]:
    """As of a loop without calls: the fake kernel tells what a call would have returned."""

    def element(argument: Any, in_dim: int | None) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = list(argument.shape)
        if in_dim is not None:
            del shape[in_dim]
        return torch.empty(shape, dtype=argument.dtype, device="meta")

    device = _tensors(inputs)[0].device

    def none_of(result: Tensor) -> Tensor:
        return torch.empty((0, *result.shape), dtype=result.dtype, device=device)

    result = operator(*map(element, inputs, in_dims), **keywords)
    if isinstance(result, Tensor):
        return none_of(result), 0
    return tuple(map(none_of, result)), (0,) * len(result)


def register_flops(
    *names: str, takes_tensors: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the function that computes the floating-point operations of these operators.

    It gets the operator's arguments, shapes in place of tensors unless it takes those, and serves
    torch.utils.flop_counter.FlopCounterMode.
    """
    packets = [_find(name)._overloadpacket for name in names]

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        def add() -> None:
            from torch.utils.flop_counter import register_flop_formula

            register_flop_formula(packets, get_raw=takes_tensors)(formula)

        # It imports Triton, where that is installed: a tenth of a second.
        after_import("torch.utils.flop_counter", add)
        return formula

    return register


def register_elementwise(name: str, kernel: str, result_types: ResultTypes, *, inputs: str) -> None:
    """Give a defined operator an elementwise Numba kernel on cpu and foo, and its fake kernel.

    Inputs may have any strides and are broadcast and promoted to a common dtype.

    Args:
        name: the operator, of the form ``f(Tensor a, ...) -> Tensor``, in place or with ``out``.
        kernel: the module in ``foo_ops.kernels`` whose ``build(dtype)`` makes the kernel.
        result_types: the dtypes of the inputs, once promoted, and for each that of the result.
        inputs: these dtypes in words, for the message that refuses all others.

    Raises:
        TypeError: when the operator is called with a dtype that is not in ``result_types``.
    """
    operator = _find(name)
    _C.register_elementwise(name, kernel, dict(result_types), inputs)

    @register_fake(name)
    def fake(*inputs: Tensor, out: Tensor | None = None) -> Tensor:
        # Imported here, since torch._refs takes 0.1 s, and a fake kernel runs under compilation.
        from torch._prims_common import (
            compute_elementwise_output_strides,
            is_contiguous_or_false,
            make_contiguous_strides_for,
        )
        from torch._refs import _broadcast_shapes

        result_type = _C.elementwise_result_type(name, list(inputs), out)
        shape = tuple(_broadcast_shapes(*(tensor.shape for tensor in inputs)))
        if out is not None:
            return out if out.shape == shape else out.resize_(shape)
        if operator._schema.is_mutable:
            return inputs[0]
        # TensorIterator's own first question; it tells in empty tensors and dimensions of size 1.
        if all(tensor.shape == shape and is_contiguous_or_false(tensor) for tensor in inputs):
            strides = make_contiguous_strides_for(shape)
        else:
            expanded = (tensor.expand(shape) for tensor in inputs)
            strides = compute_elementwise_output_strides(*expanded)
        return torch.empty_strided(shape, strides, dtype=result_type, device=inputs[0].device)

    if operator._overloadname == "out":
        _functionalize_out(operator)


def _functionalize_out(operator: torch._ops.OpOverload) -> None:
    """Under functionalization f.out(*inputs, out=out) is out.copy_(f(*inputs)).

    torch.Tag.out would say the same, but Inductor 2.13 then allocates the output of the functional
    operator itself and fails for dynamic shapes: FixedLayout takes no SymInt.
    """
    functional = operator._overloadpacket.default

    @operator.py_functionalize_impl
    def functionalize(ctx: Any, *inputs: Tensor, out: Tensor) -> Tensor:
        with ctx.mode:
            result = functional(*inputs)
            if out.shape != result.shape:
                out.resize_(result.shape)
            return out.copy_(result)


OPCHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


def opcheck(
    op: torch._ops.OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    test_utils: str | Sequence[str] = OPCHECKS,
    raise_exception: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, Any]:
    """As torch.library.opcheck, on device foo too, and with a check that gradients are recorded.

    torch's ``test_autograd_registration`` refuses devices other than cpu, cuda and xpu, and asks
    only whether a kernel stands on the autograd key. Here it is also called, on any device: where
    an input requires a gradient, an output must, and through a formula.
    """
    # Imported here, since it brings in much that only tests need.
    from torch.testing._internal.optests import OpCheckError

    names = (test_utils,) if isinstance(test_utils, str) else tuple(test_utils)
    if names == ("ALL",):
        names = OPCHECKS
    tensors = _tensors((args, kwargs))
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


def _records_gradient(
    op: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    # In this mode an operator without a formula gives outputs that require no gradient.
    mode = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    try:
        outputs = op(*args, **kwargs)
    finally:
        torch._C._set_autograd_fallback_mode(mode)
    return any(output.requires_grad for output in _tensors(outputs))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _find(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
