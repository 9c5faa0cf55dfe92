"""foo::grouped_linear and foo::moe_experts in the table of operators.

Experts round between their products: the errors of each step are carried through the next ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops.testing import reference
from foo_ops.testing.spec import Dtypes, Maker, OpSpec, Sample, Tensors, random
from foo_ops.testing.tolerance import Approximate, bound, product, slopes, smooth

# ------------------------------------------------------------------------------------------- groups


def groups_sample(
    name: str, counts: Sequence[int], depth: int, columns: int, *, more: int = 0, bias: bool = False
) -> Maker:
    """Make a sample of groups with these numbers of rows, and ``more`` rows of no group."""
    groups, rows = len(counts), sum(counts) + more

    def make(dtype: torch.dtype) -> Sample:
        shapes = ((rows, depth), (groups, columns, depth), (groups, columns))
        input, weight, of_groups = random(name, *shapes, dtype=dtype)
        offsets = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return Sample((input, weight, offsets, of_groups) if bias else (input, weight, offsets))

    return make


def sized_groups(dtype: torch.dtype, size: int) -> Sample:
    return groups_sample("sized", (size, 0, 2 * size), size + 3, size + 1, bias=True)(dtype)


def grouped_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    value, magnitude = (
        reference.grouped_linear(*it.inputs) for it in (sample, sample.map(torch.abs))
    )
    return (bound(value, magnitude, sample.inputs[0].shape[-1], dtype),)


def grouped_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    input, weight, offsets, *_ = sample.inputs
    (grad,), (dtype, *_) = cotangents, dtypes
    assert dtype is not None
    member = torch.zeros(weight.shape[0], input.shape[0], dtype=torch.float64)
    for group, (first, end) in enumerate(reference.groups_of(offsets)):
        member[group, first:end] = 1.0
    products = (
        ("es,sn,enk->sk", (member, grad, weight), weight.shape[1]),
        ("es,sn,sk->enk", (member, grad, input), input.shape[0]),
        None,
        ("es,sn->en", (member, grad), input.shape[0]),
    )
    budgets = []
    for tensor, given in zip(sample.inputs, products):
        if given is not None and tensor.requires_grad:
            equation, of, terms = given
            value, magnitude = (torch.einsum(equation, *it) for it in (of, [x.abs() for x in of]))
            budgets.append(bound(value, magnitude, terms, dtype))
    return tuple(budgets)


GROUPED_LINEAR = OpSpec(
    operator=torch.ops.foo.grouped_linear.default,
    reference=reference.grouped_linear,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=sized_groups,
    samples={
        "no bias": groups_sample("no bias", (3, 0, 4, 1), 35, 18),
        "rows of no group": groups_sample("rows of no group", (3, 9), 20, 17, more=4, bias=True),
        "no groups": groups_sample("no groups", (), 5, 4, more=3),
        "no depth": groups_sample("no depth", (2, 3), 0, 5, bias=True),
        "few and many rows": groups_sample("few and many", (1, 70, 8, 0, 9), 515, 71),
    },
    essential=("size1", "size7", "rows of no group"),
    in_layouts=("size7", "few and many rows"),
    large=groups_sample("large", (100, 3, 0, 250), 300, 333),
    output_budget=grouped_output_budget,
    gradient_budget=grouped_gradient_budget,
)

# ------------------------------------------------------------------------------------------ experts


def experts_sample(
    name: str,
    tokens: int,
    experts: int,
    top_k: int,
    depth: int,
    columns: int,
    *,
    has_bias: bool = False,
    none: bool = False,
    **options: Any,
) -> Maker:
    """Make a sample whose tokens choose experts at random, the last expert never.

    With ``none``, some choices are of no expert.
    """
    width = columns if options.get("is_gated") is False else 2 * columns

    def make(dtype: torch.dtype) -> Sample:
        hidden, weight, gate_up, down, *biases = random(
            f"moe_experts {name}",
            (tokens, depth),
            (tokens, top_k),
            (experts, width, depth),
            (experts, depth, columns),
            (experts, width),
            (experts, depth),
            dtype=dtype,
        )
        gate_up, down = gate_up / max(1, depth) ** 0.5, down / max(1, columns) ** 0.5
        generator = torch.Generator().manual_seed(tokens)
        index = torch.randint(max(1, experts - 1), (tokens, top_k), generator=generator)
        if none:
            index[::3, -1] = experts
        inputs = (hidden, index, weight, gate_up, down, *(biases if has_bias else ()))
        return Sample(inputs, options)

    return make


def sized_experts(dtype: torch.dtype, size: int) -> Sample:
    return experts_sample("sized", size, 4, 2, size + 3, size + 1)(dtype)


class Passes:
    """The operator's steps forward and backward, with their errors."""

    def __init__(self, sample: Sample, dtype: torch.dtype) -> None:
        self.dtype, self.options = dtype, sample.keywords
        hidden, self.index, weight, gate_up, down, *biases = sample.inputs
        self.top_k, self.experts = self.index.shape[1], gate_up.shape[0]
        self.biases = [None if it is None else self.of_choices(it) for it in (*biases, None, None)]
        self.hidden, self.weight = Approximate.exact(hidden), Approximate.exact(weight)
        self.gate_up, self.down = self.of_choices(gate_up), self.of_choices(down)

    def of_choices(self, tensor: Tensor) -> Approximate:
        """Return a tensor of experts for each choice; those of no expert have zeros."""
        padded = torch.cat((tensor, torch.zeros_like(tensor[:1])))
        return Approximate.exact(padded[self.index])

    def forward(self) -> Approximate:
        depth, columns = self.gate_up.value.shape[-1], self.down.value.shape[-1]
        projected = product("tk,tjnk->tjn", self.hidden, self.gate_up, depth + 1, self.dtype)
        if self.biases[0] is not None:
            projected = projected + self.biases[0]
            projected = projected.rounded(self.dtype)
        self.gate, self.up = self.halves(projected)
        self.activated = self.activate().rounded(self.dtype)
        result = product("tjn,tjln->tjl", self.activated, self.down, columns + 1, self.dtype)
        if self.biases[1] is not None:
            result = (result + self.biases[1]).rounded(self.dtype)
        return product("tj,tjl->tl", self.weight, result, self.top_k, self.dtype)

    def halves(self, projected: Approximate) -> tuple[Approximate, Approximate | None]:
        if self.options.get("is_gated") is False:
            return projected, None
        if self.options.get("is_interleaved"):
            return projected.map(lambda x: x[..., ::2]), projected.map(lambda x: x[..., 1::2])
        width = projected.value.shape[-1] // 2
        return projected.map(lambda x: x[..., :width]), projected.map(lambda x: x[..., width:])

    def value(self, gate: Tensor) -> Tensor:
        return reference.activation_of(gate, **self.options)

    def factor(self, up: Tensor) -> Tensor:
        return reference.factor_of(up, **self.options)

    def activate(self) -> Approximate:
        activated = smooth(self.value, self.gate)
        return activated if self.up is None else activated * smooth(self.factor, self.up)

    def backward(self, grad: Tensor) -> dict[str, Approximate]:
        self.forward()
        dtype, given = self.dtype, Approximate.exact(grad)
        depth = self.down.value.shape[-2]
        of_activated = product("tl,tjln->tjn", given, self.down, depth, dtype)
        columns = self.activated.value.shape[-1]
        of_weight = product("tjn,tjn->tj", of_activated, self.activate(), columns, dtype)
        if self.biases[1] is not None:
            part = product("tl,tjl->tj", given, self.biases[1], depth, dtype)
            of_weight = (of_weight + part).rounded(dtype)
        weight = self.weight.map(lambda x: x.unsqueeze(-1))
        weighted = weight.rounded(dtype) * of_activated
        slope = smooth(lambda gate: slopes(self.value, gate), self.gate)
        of_gate, parts = weighted * slope, []
        if self.up is not None:
            of_gate = of_gate * smooth(self.factor, self.up)
            of_up = weighted * smooth(self.value, self.gate)
            of_up = of_up * smooth(lambda up: slopes(self.factor, up), self.up)
            parts = [of_up.rounded(dtype)]
        projected = self.joined([of_gate.rounded(dtype), *parts])
        rows = product("tjn,tjnk->tjk", projected, self.gate_up, projected.value.shape[-1], dtype)
        member, terms = self.members(), self.index.numel()
        activated = (weight * self.activate()).rounded(dtype)
        ones = Approximate.exact(torch.ones(self.index.shape, dtype=torch.float64))
        of_token = product("tj,tjk->tk", ones, rows, self.top_k, dtype)

        def of_experts(equation: str, a: Approximate, b: Approximate) -> Approximate:
            """Sum over the choices of each expert."""
            chosen = a.map(lambda x: torch.einsum("tje,tj...->tje...", member, x))
            return product(equation, chosen, b, terms, dtype)

        each = given.map(lambda x: x.unsqueeze(1).expand(-1, self.top_k, -1))
        one = Approximate.exact(torch.ones((), dtype=torch.float64))
        return {
            "hidden": of_token,
            "expert_weight": of_weight,
            "gate_up": of_experts("tjen,tk->enk", projected, self.hidden),
            "down": of_experts("tjel,tjn->eln", each, activated),
            "gate_up_bias": of_experts("tjen,...->en", projected, one),
            "down_bias": of_experts("tjel,tj->el", each, self.weight.rounded(dtype)),
        }

    def members(self) -> Tensor:
        return (self.index.unsqueeze(-1) == torch.arange(self.experts)).double()

    def joined(self, parts: list[Approximate]) -> Approximate:
        if len(parts) == 1:
            return parts[0]
        if self.options.get("is_interleaved"):
            both = (
                torch.stack([getattr(it, name) for it in parts], -1).flatten(-2)
                for name in ("value", "error")
            )
        else:
            both = (
                torch.cat([getattr(it, name) for it in parts], -1) for name in ("value", "error")
            )
        return Approximate(*both)


def experts_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    return (Passes(sample, dtype).forward().error,)


GRADIENTS = ("hidden", "", "expert_weight", "gate_up", "down", "gate_up_bias", "down_bias")


def experts_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    dtype = dtypes[0]
    assert dtype is not None
    inputs = tuple(it.detach() if isinstance(it, Tensor) else it for it in sample.inputs)
    detached = dataclasses.replace(sample, inputs=inputs)
    found = Passes(detached, dtype).backward(cotangents[0])
    budgets = []
    for name, tensor in zip(GRADIENTS, sample.inputs):
        if tensor is not None and tensor.requires_grad:
            budgets.append(found[name].error)
    return tuple(budgets)


GPT_OSS: dict[str, Any] = {"is_interleaved": True, "alpha": 1.702, "limit": 1.5, "up_offset": 1.0}
MOE_EXPERTS = OpSpec(
    operator=torch.ops.foo.moe_experts.default,
    reference=reference.moe_experts,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=sized_experts,
    samples={
        "no expert": experts_sample("no expert", 7, 3, 2, 20, 9, none=True, has_bias=True),
        "gpt-oss": experts_sample("gpt-oss", 9, 4, 2, 21, 18, has_bias=True, **GPT_OSS),
        "relu2 without gate": experts_sample(
            "relu2", 6, 3, 2, 19, 17, activation="relu2", is_gated=False
        ),
        "gelu": experts_sample("gelu", 5, 3, 1, 18, 19, activation="gelu"),
        "gelu_tanh": experts_sample("gelu_tanh", 5, 3, 3, 18, 19, activation="gelu_tanh"),
        "relu": experts_sample("relu", 5, 3, 2, 18, 19, activation="relu", limit=0.5),
        "many rows": experts_sample("many rows", 90, 4, 2, 70, 66),
    },
    essential=("size1", "size7", "gpt-oss"),
    in_layouts=("size7", "gpt-oss"),
    large=experts_sample("large", 301, 5, 3, 130, 90),
    output_budget=experts_output_budget,
    gradient_budget=experts_gradient_budget,
)
