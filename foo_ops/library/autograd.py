"""Register gradients: operators that compute them, composites, and formulas in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foo_ops import _C
from foo_ops.library.formula import CompositeFormula, Formula
from foo_ops.library.operators import (
    BACKWARDS,
    VARIANTS,
    find,
    keep,
    library_of,
    note,
    own_library,
)
from foo_ops.library.python_results import counted
from foo_ops.library.refusals import end_refusal, refuse_derivatives
from foo_ops.library.refused_arguments import refusing


def register_autograd(
    op: str | torch._ops.OpOverload | torch.library.CustomOpDef,
    backward: Callable[..., Any] | str | torch._ops.OpOverload | None = None,
    /,
    *,
    setup_context: Callable[..., None] | None = None,
    composite: Callable[..., Any] | None = None,
    lib: torch.library.Library | None = None,
) -> None:
    """Register gradients; calls without any enter no Python.

    There are three ways to tell them:

    - ``backward`` names an operator that computes the gradients. A call that needs some is recorded
      in C++, as those of PyTorch's own operators are, and torch.func differentiates it. What the
      operator's arguments are is told by their names: an argument of ``op``, a result of ``op``,
      ``grad_<result>``, or ``<argument>_requires_grad``, a bool. Where the results of ``op`` have
      no names, other names stand for their gradients, in their order. A gradient that is optional
      is None where nothing depends on the result, else it is zeros. A result whose gradient it does
      not take, such as a statistic kept for it, has none. A tensor that is optional there
      and not in ``op`` is a factor of the gradients of others, and is saved where one of those is
      needed. The results are ``grad_<argument>``, or without names one for each tensor. Second
      derivatives are those of the backward operator; without any it refuses to be differentiated.
    - ``composite`` computes the same as ``op`` with PyTorch's own operators. It is called where
      there are tangents of forward-mode differentiation. Without ``backward`` it is differentiated
      in the backward pass, so that derivatives of every order follow from it, and calls that are
      recorded run at the operator's own speed.
    - ``backward`` is a formula in Python, as torch.library.register_autograd takes it. A call that
      needs gradients is recorded in C++ as well, and enters Python for ``setup_context`` only.
      torch.func differentiates it.

    Args:
        op: the operator, such as ``"foo::abs"``; its schema must be functional.
        backward: ``"foo::abs_backward"``, or ``backward(ctx, *gradients)``, which returns a
            gradient or None for each input.
        setup_context: ``setup_context(ctx, inputs, output)``, saves what a formula needs; with
            keyword-only arguments in the schema also ``keyword_only_inputs``.
        composite: takes the arguments of the operator and returns its results.
        lib: the registration ends with it; without it, with the process.

    Raises:
        TypeError: for a backward operator whose names or types do not fit.
        RuntimeError: for a formula of an operator that writes to its arguments.
        NotImplementedError: for a formula of an operator with keyword-only tensors.

    Example:
        >>> foo_ops.library.define("mylib::times", "(Tensor x, float by) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::times", "cpu", foo_ops.library.elementwise_kernel(lambda x, by: by * x)
        ... )
        >>> foo_ops.library.define("mylib::times_backward", "(Tensor grad, float by) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::times_backward",
        ...     "cpu",
        ...     foo_ops.library.elementwise_kernel(lambda grad, by: by * grad),
        ... )
        >>> foo_ops.library.register_autograd(
        ...     "mylib::times", "mylib::times_backward", composite=lambda x, by: by * x
        ... )
        >>> torch.func.grad(lambda x: torch.ops.mylib.times(x, 3.0))(torch.tensor(1.0))
        tensor(3.)
    """
    name = find(op).name()
    lib = own_library(op, lib)
    if isinstance(op, torch.library.CustomOpDef):
        op.register_autograd(_only_formula(op, backward, composite), setup_context=setup_context)
        return
    if isinstance(backward, torch._ops.OpOverloadPacket):
        backward = backward.default
    if isinstance(backward, torch._ops.OpOverload):
        backward = backward.name()
    formula: Formula | CompositeFormula | None = None
    if callable(backward):
        formula = _formula(name, backward, setup_context)
    elif setup_context is not None:
        raise TypeError(f"{name}: setup_context is for a formula in Python, backward=function")
    if backward is None and composite is None:
        raise TypeError(f"{name}: register_autograd must be given backward, composite or both")
    if not (backward is None or callable(backward) or isinstance(backward, str)):
        raise TypeError(
            f"{name}: backward must be the name of an operator, or a function, got {backward!r}"
        )
    if isinstance(backward, str):
        backward = find(backward).name()
    if composite is not None:
        composite = counted(name, "composite", composite)
    if backward is None and composite is not None:
        formula = CompositeFormula(_functional(name), composite)
    end_refusal(name)
    if composite is not None:
        _register_on_autograd_key(name, refusing(name, composite), lib)
    tangents = _C.Tangents.not_implemented if composite is None else _C.Tangents.composite
    if formula is not None:
        keep(_C.register_formula(name, formula, tangents), lib)
    elif isinstance(backward, str):
        keep(_C.register_backward_operator(name, backward, tangents), lib)
        note(BACKWARDS, name, backward, lib)
        message = (
            f"{backward}: it computes the gradients of {name} and has no derivative itself; to get "
            "one, give foo_ops.library.register_autograd a composite of it"
        )
        refuse_derivatives(backward, message, lib)


def _only_formula(
    op: torch.library.CustomOpDef, backward: Any, composite: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return what torch's own registers, for an operator that torch.library.custom_op made."""
    if composite is not None or not callable(backward) or hasattr(backward, "_schema"):
        raise TypeError(
            f"{op._qualname}: an operator of custom_op takes a formula in Python, "
            "backward=function, and nothing else"
        )
    return backward


def _functional(name: str) -> torch._ops.OpOverload:
    operator = find(name)
    schema = operator._schema
    if schema.is_mutable or not schema.returns:
        raise RuntimeError(
            f"{name}: only a functional operator, which writes to no argument and has results, can "
            f"have a formula, got {schema}"
        )
    return operator


def _formula(name: str, backward: Any, setup_context: Callable[..., None] | None) -> Formula:
    operator = _functional(name)
    arguments = operator._schema.arguments
    tensors = [it.name for it in arguments if it.kwarg_only and "Tensor" in str(it.type)]
    if tensors:
        raise NotImplementedError(
            f"{name}: an operator with a formula must not have keyword-only tensors, got "
            f"{', '.join(tensors)}"
        )
    return Formula(operator, backward, setup_context)


def _register_on_autograd_key(
    name: str, function: Callable[..., Any], lib: torch.library.Library | None
) -> None:
    library_of(name, lib).impl(name.partition("::")[2], function, "Autograd")


def register_variant_autograd(
    op: str | torch._ops.OpOverload, /, *, lib: torch.library.Library | None = None
) -> None:
    """Register autograd for the in-place or out variant of an operator that has gradients.

    In place, ``f_(a)`` is differentiated as ``a.copy_(f(a.clone()))``, which handles views and
    versions. An out variant refuses tensors that need a gradient, as torch's own do.

    Example:
        >>> kernel = foo_ops.library.elementwise_kernel(lambda x: 5.0 * x)
        >>> foo_ops.library.define("mylib::fivefold", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel("mylib::fivefold", "cpu", kernel)
        >>> foo_ops.library.register_autograd("mylib::fivefold", lambda ctx, grad: 5.0 * grad)
        >>> foo_ops.library.define("mylib::fivefold_", "(Tensor(a!) input) -> Tensor(a!)")
        >>> foo_ops.library.register_kernel("mylib::fivefold_", "cpu", kernel)
        >>> foo_ops.library.register_variant_autograd("mylib::fivefold_")
        >>> input = torch.ones(2, requires_grad=True)
        >>> torch.ops.mylib.fivefold_(input.clone()).sum().backward()
        >>> input.grad
        tensor([5., 5.])
    """
    name = find(op).name()
    end_refusal(name)
    keep(_C.register_variant_autograd(name), own_library(name, lib))
    if name.endswith("_"):
        note(VARIANTS, name, name.removesuffix("_"), own_library(name, lib))
