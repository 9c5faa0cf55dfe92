"""Register gradients: formulas in Python that cost nothing where no gradient is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.library.operators import find, keep, library_of


def register_autograd(
    op: str | torch._ops.OpOverload | torch.library.CustomOpDef,
    backward: Callable[..., Any],
    /,
    *,
    setup_context: Callable[..., None] | None = None,
    lib: torch.library.Library | None = None,
) -> None:
    """Register a formula as torch.library does, but calls without gradients enter no Python.

    Args:
        op: the operator, such as ``"foo::abs"``; its schema must be functional.
        backward: ``backward(ctx, *gradients)``, returns a gradient or None for each input.
        setup_context: ``setup_context(ctx, inputs, output)``, saves what backward needs; with
            keyword-only arguments in the schema also ``keyword_only_inputs``.
        lib: the registration ends with it; without it, with the process.
    """
    torch.library.register_autograd(op, backward, setup_context=setup_context, lib=lib)
    if isinstance(op, torch.library.CustomOpDef):
        return
    keep(_C.register_autograd_shortcut(op if isinstance(op, str) else op.name()), lib)


def register_variant_autograd(
    op: str | torch._ops.OpOverload, /, *, lib: torch.library.Library | None = None
) -> None:
    """Register autograd for the in-place or out variant of an operator that has a formula.

    In place, ``f_(a)`` is differentiated as ``a.copy_(f(a.clone()))``, which handles views and
    versions. An out variant refuses tensors that need a gradient, as torch's own do.
    """
    operator = find(op) if isinstance(op, str) else op
    packet = operator._overloadpacket
    name = operator.name()

    def in_place(keyset: torch._C.DispatchKeySet, *inputs: Any, **keywords: Any) -> Tensor:
        functional = find(name.removesuffix("_"))
        # The formula may keep its input, which is about to be overwritten.
        return inputs[0].copy_(functional(inputs[0].clone(), *inputs[1:], **keywords))

    def refuse(keyset: torch._C.DispatchKeySet, *inputs: Any, **keywords: Any) -> None:
        raise RuntimeError(
            f"{packet.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )

    is_in_place = operator._overloadname == "default"
    library = library_of(name, lib)
    formula = in_place if is_in_place else refuse
    library.impl(name.partition("::")[2], formula, "Autograd", with_keyset=True)
    keep(_C.register_autograd_shortcut(name), lib)
