"""foo::moe_experts in mixtures of experts, and as the experts' implementation ``"foo"``.

transformers has a table of implementations (`ALL_EXPERTS_FUNCTIONS`): functions that take an
experts module, its input, and the choices of its router. Ours is ``"foo"``:

    from_pretrained(path, experts_implementation="foo")

`apply` gives the modules a forward that calls it, whatever their configuration names.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from foo_ops.integrations.transformers.replacement import (
    Replacement,
    are_alike,
    has_hooks,
    has_own_forward,
    is_near,
    is_taken,
    stand_in,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.experts.grouped_linear import grouped_linear
from foo_ops.ops.experts.mixture import ACTIVATIONS, activate, moe_experts

NAME = "foo"
FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
"""Attributes that transformers' decorator of experts sets: how their weights lie."""

# ------------------------------------------------------------------------------------------- gates


def numbers_of(module: Any) -> tuple[float, ...]:
    """Return a module's own numbers, among which the bounds of its gate are."""
    own = vars(module).values()
    return tuple(
        sorted({float(it) for it in own if type(it) in (int, float) and 0 < it < math.inf})
    )


def gate_of(module: Any) -> dict[str, Any] | None:
    """Return the options of `foo_ops.moe_experts` for a module's gate, or None for another gate.

    A gate is known by its computation: it must agree with the operator's on random numbers.
    """
    act_fn = getattr(module, "act_fn", None)
    if isinstance(act_fn, nn.Module) and (has_hooks(act_fn) or next(act_fn.parameters(), None)):
        return None
    own = type(module)._apply_gate if module.has_gate else None
    key = (own, repr(act_fn), bool(module.has_gate), bool(module.is_concatenated))
    return _known_gate(key, numbers_of(module), functools.partial(_gate, module))


_gates: dict[Any, dict[str, Any] | None] = {}


def _known_gate(
    key: Any, numbers: tuple[float, ...], gate: Callable[[Tensor], Tensor]
) -> dict[str, Any] | None:
    if (key, numbers) not in _gates:
        # A model that is being loaded is made under torch.device("meta").
        with torch.device("cpu"):
            _gates[key, numbers] = _recognised(key, numbers, gate)
    return _gates[key, numbers]


def _gate(module: Any, projected: Tensor) -> Tensor:
    """Apply a module's own gate, or its activation if it has none."""
    result: Tensor = (module._apply_gate if module.has_gate else module.act_fn)(projected)
    return result


def _recognised(
    key: Any, numbers: tuple[float, ...], gate: Callable[[Tensor], Tensor]
) -> dict[str, Any] | None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([0.1, 1.0, 10.0, 1000.0, 100000.0], dtype=torch.float64)
    projected = torch.randn(2, 5, 16, generator=generator, dtype=torch.float64) * sizes[:, None]

    def agrees(options: dict[str, Any], dtype: torch.dtype) -> bool:
        try:
            own = gate(projected.to(dtype))
        except Exception:  # a gate that needs more than its input is another kind
            return False
        return is_near(own, activate(projected.to(dtype), **options))

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for options in candidates(key, numbers):
            # float16 shows how a gate overflows.
            if agrees(options, torch.float64) and all(agrees(options, it) for it in FLOATING):
                return options
    return None


def candidates(key: Any, numbers: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Yield the options that a gate may have."""
    _, _, is_gated, is_concatenated = key
    shape = {"is_gated": is_gated, "is_interleaved": is_gated and not is_concatenated}
    limits = (None, *numbers)
    offsets = (0.0, 1.0) if is_gated else (0.0,)
    for limit, up_offset in itertools.product(limits, offsets):
        for alpha in dict.fromkeys((1.0, *numbers)):
            yield {
                **shape,
                "activation": "silu",
                "alpha": alpha,
                "limit": limit,
                "up_offset": up_offset,
            }
        for activation in ACTIVATIONS:
            yield {**shape, "activation": activation, "limit": limit, "up_offset": up_offset}


# --------------------------------------------------------------------------------------- forward


def names_of_weights(module: Any) -> tuple[str, str]:
    return "gate_up_proj" if module.has_gate else "up_proj", "down_proj"


def weights_of(module: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the weights as (experts, outputs, inputs), and the biases."""
    first, second = names_of_weights(module)
    up, down = getattr(module, first), getattr(module, second)
    if module.is_transposed:
        up, down = up.mT, down.mT
    if not module.has_bias:
        return up, down, None, None
    return up, down, getattr(module, f"{first}_bias"), module.down_proj_bias


def is_served(hidden: Tensor, weight: Tensor, *tensors: Tensor | None) -> bool:
    """Whether the operators support these tensors; the router's may be in float32."""
    return are_alike(hidden, *tensors) and (
        are_alike(hidden, weight) or (is_taken(weight) and weight.dtype == torch.float32)
    )


def foo_experts_forward(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute the experts of a module: transformers' interface of experts.

    Tensors that the operators do not support go to transformers' ``grouped_mm``.
    """
    arguments = hidden_states, top_k_index, top_k_weights
    is_ours = is_served(hidden_states, top_k_weights, *weights_of(module))
    result: Tensor = (compute if is_ours else grouped_mm_experts_forward)(module, *arguments)
    return result


def compute(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts in one call, or around a gate that the operator does not know."""
    options = None if module.has_post_expert_norm else gate_of(module)
    if options is None:
        return between_products(module, hidden_states, top_k_index, top_k_weights)
    up, down, *biases = weights_of(module)
    return moe_experts(hidden_states, top_k_index, top_k_weights, up, down, *biases, **options)


def between_products(
    module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute experts whose gate, or norm, is the module's own code."""
    up, down, up_bias, down_bias = weights_of(module)
    experts, top_k = up.shape[0], top_k_index.shape[1]
    sorted_index, order = top_k_index.flatten().sort(stable=True)
    bounds = torch.arange(1, experts + 1, device=sorted_index.device, dtype=sorted_index.dtype)
    offsets = torch.searchsorted(sorted_index, bounds)
    rows = grouped_linear(hidden_states[order // top_k], up, offsets, up_bias)
    rows = grouped_linear(_gate(module, rows), down, offsets, down_bias)
    if module.has_post_expert_norm:
        rows = module.post_expert_norm(rows)
    weights = top_k_weights.flatten()[order].masked_fill(sorted_index >= experts, 0.0)
    weighted = rows * weights.unsqueeze(-1)
    by_token = weighted[order.argsort()].unflatten(0, (-1, top_k))
    return by_token.sum(1).to(hidden_states.dtype)


def register_experts() -> None:
    ALL_EXPERTS_FUNCTIONS.register(NAME, foo_experts_forward)


# ------------------------------------------------------------------------------------ replacement


class FooExperts(Replacement):
    """Replaces experts that transformers' table of implementations serves."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return (
            all(hasattr(module, flag) for flag in FLAGS)
            and not has_own_forward(module)
            and agrees(module)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        arguments = hidden_states, top_k_index, top_k_weights
        if not is_served(hidden_states, top_k_weights, *weights_of(self)):
            return super().forward(*arguments)  # type: ignore[misc]
        return compute(self, *arguments)


def agrees(module: Any) -> bool:
    """Whether a module's own forward computes the same as ours in each dtype, on trial weights."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens, experts, top_k, depth, columns = 7, 3, 2, 8, 8
    if module.has_post_expert_norm:
        # The norm's own weights have the size of the module's results.
        depth = weights_of(module)[1].shape[1]
    width = 2 * columns if module.has_gate else columns
    first, second = names_of_weights(module)
    weights = {first: random(experts, width, depth), second: random(experts, depth, columns)}
    if module.is_transposed:
        weights = {name: weight.mT.contiguous() for name, weight in weights.items()}
    if module.has_bias:
        biases = {f"{first}_bias": random(experts, width), f"{second}_bias": random(experts, depth)}
        weights |= biases
    sizes = torch.logspace(-2, 3, tokens, dtype=torch.float64)
    hidden, scores = random(tokens, depth) * sizes[:, None], random(tokens, top_k).softmax(-1)
    index = torch.stack(
        [torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]
    )

    def agrees_in(dtype: torch.dtype) -> bool:
        given = {name: nn.Parameter(weight.to(dtype)) for name, weight in weights.items()}
        norm = module.has_post_expert_norm and copy.deepcopy(module.post_expert_norm).to(dtype)
        twin: Any = stand_in(module, given, {"post_expert_norm": norm} if norm else {})
        vars(twin).update(num_experts=experts)
        arguments = hidden.to(dtype), index, scores.to(dtype)
        # Below the table of implementations, some of which know no float64.
        forward: Any = type(module).forward
        try:
            own = getattr(forward, "__wrapped__", forward)(twin, *arguments)
            return is_near(own, compute(twin, *arguments))
        except Exception:  # experts that need more than their weights are another kind
            return False

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))
