"""foo::moe_experts computes the experts of a mixture (Shazeer et al. 2017) for all tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops import _C, library
from foo_ops._process import after_import
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.experts.grouped_linear import empty_gradient
from foo_ops.ops.linear import any_requires_grad

TAGS = torch.Tag.pt2_compliant_tag
INPUTS = (
    "Tensor hidden, Tensor expert_index, Tensor expert_weight, Tensor gate_up, Tensor down, "
    "Tensor? gate_up_bias{default}, Tensor? down_bias{default}"
)
OPTIONS = (
    "str activation='silu', bool is_gated=True, bool is_interleaved=False, float alpha=1.0, "
    "float? limit=None, float up_offset=0.0"
)
NAMES = ("hidden", "expert_weight", "gate_up", "down", "gate_up_bias", "down_bias")
WANTED = ", ".join(f"bool {name}_requires_grad={'bias' not in name}" for name in NAMES)
GRADIENTS = ", ".join(f"Tensor grad_{name}" for name in NAMES)
OPTIONAL, GIVEN = INPUTS.format(default="=None"), INPUTS.format(default="")

library.define("foo::moe_experts", f"({OPTIONAL}, *, {OPTIONS}) -> Tensor output", tags=TAGS)
# The same for calls that record gradients, with the projections by gate_up, which the backward pass
# would compute again: a fifth of the work of a training step.
library.define(
    "foo::moe_experts_training",
    f"({OPTIONAL}, *, {OPTIONS}) -> (Tensor output, Tensor projected)",
    tags=TAGS,
)
# The gradient of a tensor that requires none has size 0.
library.define(
    "foo::moe_experts_backward",
    f"(Tensor grad_output, {GIVEN}, *, {WANTED}, {OPTIONS}) -> ({GRADIENTS})",
    tags=TAGS,
)
library.define(
    "foo::moe_experts_training_backward",
    f"(Tensor grad_output, {GIVEN}, Tensor projected, *, {WANTED}, {OPTIONS}) -> ({GRADIENTS})",
    tags=TAGS,
)


def moe_experts(
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    is_gated: bool = True,
    is_interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Compute for each token the weighted sum of the experts that a router has chosen for it.

        gate, up = halves of (hidden @ gate_up[e].T + gate_up_bias[e])
        expert_e = (activation(gate) * (up + up_offset)) @ down[e].T + down_bias[e]
        output = sum over the choices i of expert_weight[i] * expert_(expert_index[i])

    (Shazeer et al. 2017, equation 1; gated as Shazeer 2020, equation 6.) Choices are sorted by
    expert; each product of all experts is one parallel loop. Experts that no token has chosen are
    not read.

    Args:
        hidden: (T, K), float16, bfloat16, float32 or float64, any strides.
        expert_index: (T, top_k), int32 or int64, in [0, E); E itself stands for no expert.
        expert_weight: (T, top_k), float32 or of hidden's dtype.
        gate_up: (E, 2 N, K), of hidden's dtype, any strides: the transpose of weights (E, K, 2 N)
            is taken as it is. (E, N, K) without a gate.
        down: (E, L, N), of hidden's dtype, any strides. Mostly L = K.
        gate_up_bias: (E, 2 N), or (E, N) without a gate, of hidden's dtype.
        down_bias: (E, L), of hidden's dtype.
        activation: ``silu``, ``gelu``, ``gelu_tanh``, ``relu``, or ``relu2``, the square of relu.
        is_gated: whether gate_up has gates, whose activation is multiplied by the other half.
        is_interleaved: whether gates are the even rows of gate_up, and not its first half.
        alpha: silu is x * sigmoid(alpha * x).
        limit: if given, gate is at most this, and up within plus and minus it, before anything
            else (OpenAI 2025, gpt-oss).
        up_offset: added to up.

    Returns:
        (T, L) in hidden's dtype. Each product is summed up in float32 for float16 and bfloat16, and
        rounded; so are the activated rows and the weighted sum. The result does not depend on the
        number of threads. Has gradients for all floating-point tensors, of every order; experts
        that no token has chosen have zeros.

    Raises:
        ValueError: for shapes that do not fit together, and options.
        TypeError: for dtypes.
        IndexError: for an expert outside [0, E].

    Example:
        >>> hidden, down = torch.ones(1, 2), torch.ones(3, 2, 1)
        >>> gate_up = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 2, 2)
        >>> index, weight = torch.tensor([[0, 2]]), torch.tensor([[0.5, 0.5]])
        >>> foo_ops.moe_experts(hidden, index, weight, gate_up, down, activation="relu")
        tensor([[20., 20.]])
    """
    is_recorded = any_requires_grad(hidden, expert_weight, gate_up, down, gate_up_bias, down_bias)
    operator = torch.ops.foo.moe_experts_training if is_recorded else torch.ops.foo.moe_experts
    results = operator.default(
        hidden,
        expert_index,
        expert_weight,
        gate_up,
        down,
        gate_up_bias,
        down_bias,
        activation=activation,
        is_gated=is_gated,
        is_interleaved=is_interleaved,
        alpha=alpha,
        limit=limit,
        up_offset=up_offset,
    )
    output: Tensor = results[0] if is_recorded else results
    return output


# ------------------------------------------------------------------------------------------- fake


def check(
    *inputs: Any,
    activation: str = "silu",
    is_gated: bool = True,
    alpha: float = 1.0,
    limit: float | None = None,
    **_: Any,
) -> None:
    missing = (None,) * (7 - len(inputs))
    _C.check_moe_experts(*inputs, *missing, activation, is_gated, alpha, limit)


@library.register_fake("foo::moe_experts")
def fake(*inputs: Any, **options: Any) -> Tensor:
    check(*inputs, **options)
    hidden, down = inputs[0], inputs[4]
    output: Tensor = hidden.new_empty(hidden.shape[0], down.shape[1])
    return output


@library.register_fake("foo::moe_experts_training")
def fake_training(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    output = fake(*inputs, **options)
    _, expert_index, _, gate_up, *_ = inputs
    rows = expert_index.shape[0] * expert_index.shape[1]
    return output, output.new_empty(rows, gate_up.shape[1])


@library.register_fake("foo::moe_experts_training_backward")
def fake_training_backward(
    grad_output: Tensor,
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    projected: Tensor | None,
    *,
    hidden_requires_grad: bool = True,
    expert_weight_requires_grad: bool = True,
    gate_up_requires_grad: bool = True,
    down_requires_grad: bool = True,
    gate_up_bias_requires_grad: bool = False,
    down_bias_requires_grad: bool = False,
    **options: Any,
) -> tuple[Tensor, ...]:
    inputs = (hidden, expert_index, expert_weight, gate_up, down, gate_up_bias, down_bias)
    check(*inputs, **options)
    _C.check_moe_experts_backward(grad_output, hidden, expert_index, gate_up, down, projected)
    return (
        hidden.new_empty(hidden.shape if hidden_requires_grad else 0),
        expert_weight.new_empty(expert_weight.shape if expert_weight_requires_grad else 0),
        empty_gradient(gate_up) if gate_up_requires_grad else hidden.new_empty(0),
        empty_gradient(down) if down_requires_grad else hidden.new_empty(0),
        hidden.new_empty(gate_up.shape[:2] if gate_up_bias_requires_grad else 0),
        hidden.new_empty(down.shape[:2] if down_bias_requires_grad else 0),
    )


@library.register_fake("foo::moe_experts_backward")
def fake_backward(*inputs: Any, **options: Any) -> tuple[Tensor, ...]:
    return fake_training_backward(*inputs, None, **options)


# --------------------------------------------------------------------------------------- autograd

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activate(
    projected: Tensor,
    *,
    activation: str = "silu",
    is_gated: bool = True,
    is_interleaved: bool = False,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
) -> Tensor:
    """Compute activated rows with torch's own operators."""
    gate = projected
    if is_gated and is_interleaved:
        gate, up = projected[..., ::2], projected[..., 1::2]
    elif is_gated:
        gate, up = projected.chunk(2, dim=-1)
    bound = math.inf if limit is None else limit
    gate = gate.clamp(max=bound)
    if activation == "silu":
        activated = gate * torch.sigmoid(alpha * gate)
    else:
        activated = ACTIVATIONS[activation](gate)
    return activated * (up.clamp(-bound, bound) + up_offset) if is_gated else activated


def chosen(tensor: Tensor, expert_index: Tensor) -> Tensor:
    """Return what each choice takes of a tensor of all experts, in the compute type.

    Choices of no expert take zeros.
    """
    experts = torch.cat((tensor, torch.zeros_like(tensor[:1])) if tensor.shape[0] else (tensor,))
    return experts.to(compute_type(tensor.dtype))[expert_index.long()]


def composite_training(
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute foo::moe_experts with torch's own operators, which copy a matrix for each choice."""
    compute = compute_type(hidden.dtype)
    projected = torch.einsum("tk,tjnk->tjn", hidden.to(compute), chosen(gate_up, expert_index))
    if gate_up_bias is not None:
        projected = projected + chosen(gate_up_bias, expert_index)
    activated = activate(projected, **options)
    result = torch.einsum("tjn,tjln->tjl", activated, chosen(down, expert_index))
    if down_bias is not None:
        result = result + chosen(down_bias, expert_index)
    output = torch.einsum("tj,tjl->tl", expert_weight.to(compute), result).to(hidden.dtype)
    by_expert = expert_index.flatten().argsort(stable=True)
    return output, projected.flatten(0, 1)[by_expert].to(hidden.dtype)


def composite(*inputs: Any, **options: Any) -> Tensor:
    return composite_training(*inputs, **options)[0]


def composite_training_backward(
    grad_output: Tensor, *inputs: Any, projected: Any = None, **options: Any
) -> tuple[Tensor, ...]:
    """Compute foo::moe_experts_training_backward with torch's own operators."""
    return composite_backward(grad_output, *inputs[:-1], **options)


def composite_backward(
    grad_output: Tensor,
    hidden: Tensor,
    expert_index: Tensor,
    expert_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute foo::moe_experts_backward with torch's own operators."""
    given = {
        "hidden": hidden,
        "expert_weight": expert_weight,
        "gate_up": gate_up,
        "down": down,
        "gate_up_bias": gate_up_bias,
        "down_bias": down_bias,
    }
    defaults = {name: "bias" not in name for name in given}
    are_wanted = {
        name: options.pop(f"{name}_requires_grad", default) for name, default in defaults.items()
    }
    wanted = [name for name, is_wanted in are_wanted.items() if is_wanted]

    def differentiated(*tensors: Tensor) -> Tensor:
        all_ = given | dict(zip(wanted, tensors))
        return composite(
            all_["hidden"], expert_index, all_["expert_weight"], all_["gate_up"], all_["down"],
            all_["gate_up_bias"], all_["down_bias"], **options,
        )  # fmt: skip

    pull_back = torch.func.vjp(differentiated, *(given[name] for name in wanted))[1]
    found = dict(zip(wanted, pull_back(grad_output)))
    return tuple(
        found.get(name, (expert_weight if name == "expert_weight" else hidden).new_empty(0))
        for name in given
    )


library.register_autograd("foo::moe_experts", "foo::moe_experts_backward", composite=composite)
library.register_autograd("foo::moe_experts_backward", composite=composite_backward)
library.register_autograd(
    "foo::moe_experts_training",
    "foo::moe_experts_training_backward",
    composite=composite_training,
)
library.register_autograd(
    "foo::moe_experts_training_backward", composite=composite_training_backward
)


# ---------------------------------------------------------------- sharding, vmap, autocast, FLOPs

FORWARD = ("foo::moe_experts", "foo::moe_experts_training")
BACKWARD = ("foo::moe_experts_backward", "foo::moe_experts_training_backward")
for _name in FORWARD:
    library.register_autocast(_name)
for _name in (*FORWARD, *BACKWARD):
    library.register_vmap_loop(_name)


@library.register_sharding("foo::moe_experts")
def sharding(*inputs: Any, **_: Any) -> str:
    """Shard tokens."""
    return "t ., t ., t ., . . ., . . ., . ., . . -> t ."


@library.register_sharding("foo::moe_experts_backward")
def backward_sharding(*inputs: Any, **_: Any) -> str:
    return "t ., t ., t ., t ., . . ., . . ., . ., . . -> t ., t ., . . ., . . ., . ., . ."


def register_with_dtensor() -> None:
    """Let DTensors, whose tokens are sharded, compute projections again instead of keeping them.

    Those of a process are in the order of its own choices.
    """
    from torch.distributed.tensor import DTensor

    def forward(mode: Any, _: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
        output = torch.ops.foo.moe_experts.default(*args, **kwargs)
        return output, output.to_local().new_empty(0)

    def backward(mode: Any, _: Any, types: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
        *inputs, _ = args
        found: tuple[Tensor, ...] = torch.ops.foo.moe_experts_backward.default(*inputs, **kwargs)
        return found

    library.register_torch_dispatch(FORWARD[1], DTensor, forward)
    library.register_torch_dispatch(BACKWARD[1], DTensor, backward)


after_import("torch.distributed.tensor", register_with_dtensor)


def flops_of(choices: int, depth: int, projected: int, results: int, is_gated: bool = True) -> int:
    """Count both products of all choices."""
    activated = projected // 2 if is_gated else projected
    return 2 * choices * (projected * depth + results * activated)


@library.register_flops(*FORWARD)
def flops(
    hidden_shape: torch.Size,
    index_shape: torch.Size,
    weight_shape: torch.Size,
    gate_up_shape: torch.Size,
    down_shape: torch.Size,
    *others: Any,
    is_gated: bool = True,
    **_: Any,
) -> int:
    """Count both products of all choices."""
    return flops_of(index_shape.numel(), hidden_shape[1], gate_up_shape[1], down_shape[1], is_gated)


@library.register_flops(*BACKWARD)
def backward_flops(
    grad_shape: torch.Size,
    hidden_shape: torch.Size,
    index_shape: torch.Size,
    weight_shape: torch.Size,
    gate_up_shape: torch.Size,
    down_shape: torch.Size,
    *others: Any,
    is_gated: bool = True,
    **_: Any,
) -> int:
    """Count two gradients of both products; what is computed again is not counted."""
    return 2 * flops_of(
        index_shape.numel(), hidden_shape[1], gate_up_shape[1], down_shape[1], is_gated
    )
