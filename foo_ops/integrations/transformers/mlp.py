"""foo::linear_silu_mul, foo::linear_silu_mul_quantized and foo::silu_mul in SwiGLUs, and
foo::linear_activation in other MLPs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers.linear import (
    FooConv1D,
    FooLinear,
    lone_parameters,
    lone_weight,
)
from foo_ops.integrations.transformers.quantized import (
    FooJoined,
    gated_product,
    joint_operands,
    lone_operands,
)
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    can_multiply,
    has_hooks,
    has_own_forward,
    is_near,
    is_replaced,
    is_taken,
    stand_in,
)
from foo_ops.library.operators import FLOATING
from foo_ops.ops.linear import ACTIVATIONS as FUNCTIONS
from foo_ops.ops.linear import linear, linear_silu_mul
from foo_ops.ops.silu_mul import silu_mul

ACTIVATIONS = ("act_fn", "activation_fn")
GATE_AND_UP = ("gate_proj", "up_proj")
Layer = Callable[[Tensor], Tensor]

# ------------------------------------------------------------------------------------- with silu


def gated(module: nn.Module, input: Tensor) -> Tensor:
    """Compute ``silu(gate_proj(input)) * up_proj(input)``."""
    layers = module._modules
    gate_weight, up_weight = lone_weight(layers["gate_proj"]), lone_weight(layers["up_proj"])
    if (
        gate_weight is not None
        and up_weight is not None
        and can_multiply(input, gate_weight, up_weight)
    ):
        return linear_silu_mul(input, gate_weight, up_weight)
    joint = joint_operands(module, GATE_AND_UP, input)
    if joint is None:
        return silu_mul(*(layers[name](input) for name in GATE_AND_UP))  # type: ignore[misc]
    return gated_product(input, *joint)


def has_layers(module: nn.Module, names: set[str]) -> bool:
    """Whether a module consists of these layers and an activation only."""
    if not names <= module._modules.keys() or has_own_forward(module):
        return False
    others = module._modules.keys() - names - set(ACTIVATIONS)
    return not others and not module._parameters and not module._buffers


def agrees(module: Any, widths: dict[str, int], gate_and_up: Callable[..., Any]) -> bool:
    """Whether a module's own forward computes the same as ours in each dtype, on trial layers.

    Some rows are large, so that clamping of the factors is noticed, and in float16 clamping of
    overflow.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def layer(weight: Tensor) -> Layer:
        return lambda input: input @ weight.to(input.dtype)

    width = 8
    layers = {name: layer(random(width, columns)) for name, columns in widths.items()}
    sizes = torch.tensor([0.01, 1.0, 100.0, 10000.0], dtype=torch.float64)
    input = random(2, 4, width) * sizes[:, None]
    twin: Any = stand_in(module, modules=layers)

    def agrees_in(dtype: torch.dtype) -> bool:
        try:
            own = type(module).forward(twin, input.to(dtype))
            gate, up = gate_and_up(layers, input.to(dtype))
        except Exception:  # an MLP that needs more of its layers is another kind
            return False
        return is_near(own, layers["down_proj"](F.silu(gate) * up))

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        return all(map(agrees_in, FLOATING))


class FooGatedMLP(FooJoined):
    """Replaces MLPs such as Llama's: ``down_proj(silu(gate_proj(x)) * up_proj(x))``."""

    siblings = GATE_AND_UP

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        def gate_and_up(layers: dict[str, Layer], x: Tensor) -> Any:
            return layers["gate_proj"](x), layers["up_proj"](x)

        widths = {"gate_proj": 8, "up_proj": 8, "down_proj": 8}
        return has_layers(module, set(widths)) and agrees(module, widths, gate_and_up)

    def forward(self, x: Tensor) -> Any:
        if not is_taken(x):
            return super().forward(x)  # type: ignore[misc]
        return self._modules["down_proj"](gated(self, x))  # type: ignore[arg-type]


class FooPackedMLP(Replacement):
    """Replaces MLPs such as Phi-3's, where one layer computes gate and up, side by side."""

    gate_up_proj: Layer
    down_proj: Layer

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        def gate_and_up(layers: dict[str, Layer], x: Tensor) -> Any:
            return layers["gate_up_proj"](x).chunk(2, dim=-1)

        widths = {"gate_up_proj": 16, "down_proj": 8}
        return has_layers(module, set(widths)) and agrees(module, widths, gate_and_up)

    def forward(self, hidden_states: Tensor) -> Any:
        if not is_taken(hidden_states):
            return super().forward(hidden_states)  # type: ignore[misc]
        operands = lone_operands(self.gate_up_proj, hidden_states)
        if operands is None:
            return self.down_proj(silu_mul(*self.gate_up_proj(hidden_states).chunk(2, dim=-1)))
        rows = [len(operands.weight) // 2] * 2
        return self.down_proj(gated_product(hidden_states, operands, rows))


# ---------------------------------------------------------------------------- other activations

# The activation of a linear layer is the epilogue of its product, as in BERT's intermediate layers,
# MLPs of two layers, and gated MLPs such as T5's and Gemma's.


class Form(NamedTuple):
    """How a module computes, by the names of its parts.

    Attributes:
        layers: the linear layer before the activation; if there are three, the one that is
            multiplied by the activation; if there are several, the last one.
        act: the activation.
        function: the activation's name in foo::linear_activation.
        dropout: the dropout, or None.
        drops_last: the dropout is behind the last layer, not before it.
    """

    layers: tuple[str, ...]
    act: str
    function: str
    dropout: str | None
    drops_last: bool

    def compute(self, modules: Mapping[str, Any], input: Tensor, activated: Tensor) -> Any:
        """Compute the result from that of the first layer and the activation."""
        others = self.layers[1:]
        hidden: Any = activated
        if len(others) == 2:
            hidden = hidden * modules[others[0]](input)
        if self.dropout is not None and not self.drops_last:
            hidden = modules[self.dropout](hidden)
        if others:
            hidden = modules[others[-1]](hidden)
        if self.dropout is not None and self.drops_last:
            hidden = modules[self.dropout](hidden)
        return hidden


class TrialLayer:
    """A square linear layer with a weight of one dtype."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, input: Tensor) -> Tensor:
        return input @ self.weight


def forms_of(module: nn.Module) -> Iterator[Form]:
    """Yield the forms that a module with these parts may have."""
    parts = {name: it for name, it in module._modules.items() if it is not None}
    linears = [name for name, it in parts.items() if is_linear(it)]
    dropouts = [name for name, it in parts.items() if isinstance(it, nn.Dropout)]
    acts = parts.keys() - {*linears, *dropouts}
    if module._parameters or module._buffers or len(acts) != 1 or len(dropouts) > 1:
        return
    (act,) = acts
    if not 1 <= len(linears) <= 3 or next(parts[act].parameters(), None) is not None:
        return
    function = function_of(parts[act])
    if function is None or not takes_one(module):
        return
    dropout = dropouts[0] if dropouts else None
    for layers in permutations(linears):
        for drops_last in (True, False) if dropout else (True,):
            yield Form(layers, act, function, dropout, drops_last)


def is_linear(module: nn.Module) -> bool:
    """Whether `apply` replaces a module by foo::linear, or has done so."""
    if is_replaced(module):
        return isinstance(module, (nn.Linear, Conv1D))
    return FooLinear.recognises(module) or FooConv1D.recognises(module)


def takes_one(module: nn.Module) -> bool:
    return len(inspect.signature(type(module).forward).parameters) == 2


def function_of(act: Any) -> str | None:
    """Return the name of an activation of foo::linear_activation, or None."""
    input = torch.linspace(-9, 9, 145, dtype=torch.float64)

    def agrees_in(function: Layer, dtype: torch.dtype) -> bool:
        try:
            return is_near(act(input.to(dtype)), function(input.to(dtype)))
        except Exception:  # a module that takes no tensor
            return False

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for name, function in FUNCTIONS.items():
            if all(agrees_in(function, dtype) for dtype in FLOATING):
                return name
    return None


def form_of(module: nn.Module) -> Form | None:
    """Return the form that a module's own forward has on trial layers in each dtype, or None."""
    if has_own_forward(module):
        return None
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    width = 8
    weights = random(3, width, width)
    input = random(2, 4, width) * torch.tensor([0.01, 1.0, 10.0, 1000.0])[:, None].double()

    def agrees_in(form: Form, dtype: torch.dtype) -> bool:
        layers = {name: TrialLayer(it.to(dtype)) for name, it in zip(form.layers, weights)}
        modules: dict[str, Any] = dict(layers)
        if form.dropout is not None:
            modules[form.dropout] = lambda input: input.flip(-1)
        x = input.to(dtype)
        try:
            own = type(module).forward(stand_in(module, modules=modules), x)
            activated = FUNCTIONS[form.function](layers[form.layers[0]](x))
            return is_near(own, form.compute(modules, x, activated))
        except Exception:  # a module that needs more of its layers is another kind
            return False

    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for form in forms_of(module):
            if all(agrees_in(form, dtype) for dtype in FLOATING):
                return form
    return None


class FooActivatedMLP(Replacement):
    """Replaces MLPs and parts of MLPs whose first layer has an activation of foo::linear."""

    _foo_form: Form
    _modules: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return form_of(module) is not None

    @classmethod
    def prepare(cls, module: Any) -> None:
        module._foo_form = form_of(module)

    @classmethod
    def forget(cls, module: Any) -> None:
        del module._foo_form

    def forward(self, hidden_states: Tensor) -> Any:
        form, modules = self._foo_form, self._modules
        given = lone_parameters(modules[form.layers[0]])
        if given is None or not self.fuses(hidden_states, *given):
            return super().forward(hidden_states)  # type: ignore[misc]
        activated = linear(hidden_states, *given, activation=form.function)
        return form.compute(modules, hidden_states, activated)

    def fuses(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether a product with an epilogue computes what layer and activation do."""
        form, modules = self._foo_form, self._modules
        others = (getattr(modules[name], "weight", None) for name in form.layers[1:])
        return (
            can_multiply(input, weight, bias)
            and all(isinstance(it, Tensor) and can_multiply(input, it) for it in others)
            and input.is_contiguous()
            and not has_hooks(modules[form.act])
            # An activation of elementwise operators may then be computed in float32.
            and (input.is_cpu or not torch.is_autocast_enabled(input.device.type))
        )
