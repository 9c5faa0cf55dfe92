"""Gradients: formulas in Python that cost nothing where no gradient is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.library.operators import find, impl_forever


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
    operator = find(name)
    in_place = operator._overloadname == "default"
    packet = operator._overloadpacket

    def formula(keyset: torch._C.DispatchKeySet, *inputs: Tensor, **keywords: Tensor) -> Tensor:
        if in_place:
            functional = find(name.removesuffix("_"))
            # The formula may keep its input, which is about to be overwritten.
            return inputs[0].copy_(functional(inputs[0].clone(), *inputs[1:]))
        raise RuntimeError(
            f"{packet.__name__}(): functions with out=... arguments don't support automatic "
            "differentiation, but one of the arguments requires grad."
        )

    impl_forever(name, formula, "Autograd", with_keyset=True)
    _C.register_autograd_shortcut(name)
