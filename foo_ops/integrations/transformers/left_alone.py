"""Which modules of a model `apply` does not change, and why."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers.attention_layers import (
    EAGER,
    FooAttention,
    looks_up,
    own_function,
)
from foo_ops.integrations.transformers.linear import FooConv1D, FooLinear
from foo_ops.integrations.transformers.mlp import FooGatedMLP, FooPackedMLP
from foo_ops.integrations.transformers.norms import FooOffsetRMSNorm, FooRMSNorm
from foo_ops.integrations.transformers.replacement import (
    PLAIN,
    Replacement,
    has_own_forward,
    holds,
    is_replaced,
)

OTHER_FORWARD = "another forward was put in its place"
NOT_ASKED = "apply was not asked for it"


def left_alone(model: nn.Module) -> dict[str, str]:
    """Return why modules are not changed by `apply`, by their names.

    It tells of attention layers, linear layers, norms, gated MLPs and experts. Modules whose work
    foo_ops has no operator for, such as embeddings and convolutions, are not listed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.LayerNorm(3))
        >>> left_alone(foo_ops.integrations.transformers.apply(model))
        {'1': 'foo_ops has no operator for LayerNorm'}
    """
    reasons = {name: reason_of(module) for name, module in model.named_modules()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def reason_of(module: nn.Module) -> str | None:
    name = type(module).__name__
    if isinstance(module, (nn.Linear, Conv1D)):
        return None if is_replaced(module) else reason_of_linear(module)
    if "Attention" in name and has_parameters(module) and not holds(module, "Attention"):
        return None if isinstance(module, FooAttention) else reason_of_attention(module)
    if "Norm" in name and isinstance(getattr(module, "weight", None), nn.Parameter):
        return None if is_replaced(module) else reason_of_norm(module)
    if is_replaced(module):
        return None
    if any(it.dim() == 3 for it in module._parameters.values() if it is not None):
        return "experts that are one tensor have no operator yet" if "Experts" in name else None
    if "MLP" in name and not holds(module, "MLP"):
        known = (FooGatedMLP, FooPackedMLP)
        return asked_or(module, known, "it does not compute down(silu(gate(x)) * up(x))")
    return None


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def asked_or(module: nn.Module, known: tuple[type[Replacement], ...], reason: str) -> str:
    """Return the reason, unless the module would be taken if `apply` were asked."""
    if has_own_forward(module):
        return OTHER_FORWARD
    return NOT_ASKED if any(it.recognises(module) for it in known) else reason


def reason_of_linear(module: Any) -> str:
    weight = module.weight
    reason = f"{type(module).__name__} has a forward of its own"
    if type(weight) not in PLAIN:
        reason = f"its weight is a {type(weight).__name__}"
    elif not weight.is_floating_point():
        reason = f"its weight is {weight.dtype}"
    return asked_or(module, (FooLinear, FooConv1D), reason)


def reason_of_norm(module: nn.Module) -> str:
    name = type(module).__name__
    if type(module).__module__.startswith("torch."):
        return f"foo_ops has no operator for {name}"
    return asked_or(
        module, (FooRMSNorm, FooOffsetRMSNorm), f"{name} does not compute what foo::rms_norm does"
    )


def reason_of_attention(module: Any) -> str:
    if has_own_forward(module):
        return OTHER_FORWARD
    if not looks_up(module):
        return "its forward does not look attention up in transformers' table"
    if FooAttention.recognises(module):
        return NOT_ASKED
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if own_function(module) is None or name not in (None, "eager"):
        return f"its implementation {name!r} is not one that foo::attention stands for"
    return f"its {EAGER} does not compute what foo::attention does"
