"""Let operators without derivatives say so, instead of losing gradients and tangents in silence."""

from __future__ import annotations

from typing import Any

import torch

from foo_ops import _C
from foo_ops.library.operators import keep

_AUTOGRAD_KEYS = ("Autograd", "AutogradCPU", "CompositeImplicitAutograd")
_refusals: dict[str, Any] = {}


def refuse_derivatives(name: str, message: str, lib: torch.library.Library | None) -> None:
    """Let an operator throw the message as a NotImplementedError, unless it has derivatives."""
    end_refusal(name)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if not any(has_kernel(name, key) for key in _AUTOGRAD_KEYS):
        _refusals[name] = _C.refuse_to_differentiate(name, message)
        keep(_refusals[name], lib)


def end_refusal(name: str) -> None:
    """Let an operator get its derivatives."""
    if name in _refusals:
        _refusals.pop(name).destroy()
