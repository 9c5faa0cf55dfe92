"""Compares foo::moe_experts with the ways that transformers has to compute experts.

`apply` of whole mixtures is in the table of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import foo_ops
from benchmarks.measure import OURS, Case, Contender, Contenders, Local

SECTION = "experts"
WAYS = ("eager", "batched_mm", "grouped_mm")
DTYPES = ("bfloat16", "float32")
MOST_COPIES = 2**30
"""``batched_mm`` copies the weights of each choice: with more bytes it is left out."""
TOKENS = (1, 8, 768)


@dataclass(frozen=True)
class Layer:
    """The experts of a mixture, and the tokens of a call."""

    dtype: str
    tokens: int
    trains: bool = False
    experts: int = 32
    top_k: int = 4
    width: int = 1024
    intermediate: int = 512

    @property
    def name(self) -> str:
        kind = "forward and backward" if self.trains else "forward"
        return f"experts {kind}, {self.dtype}, {self.tokens} x {self.top_k} of {self.experts}"

    def choices(self) -> int:
        return self.tokens * self.top_k

    def flops(self) -> int:
        passes = 3 if self.trains else 1
        return passes * 2 * self.choices() * 3 * self.width * self.intermediate

    def module(self) -> Any:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        config = Qwen3MoeConfig(
            hidden_size=self.width,
            moe_intermediate_size=self.intermediate,
            num_experts=self.experts,
        )
        module = Qwen3MoeExperts(config)
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
        return module.to(getattr(torch, self.dtype)).requires_grad_(self.trains)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Make hidden states, and distinct experts of each token with their weights."""
        dtype = getattr(torch, self.dtype)
        scores, index = torch.rand(self.tokens, self.experts).softmax(-1).topk(self.top_k)
        return torch.randn(self.tokens, self.width).to(dtype), index, scores.to(dtype)


def layers(sizes: Sequence[int]) -> Iterator[Layer]:
    for dtype in DTYPES:
        for tokens in sizes:
            yield Layer(dtype, tokens)
        yield Layer(dtype, sizes[-1], trains=True)


def cases(sizes: Sequence[int], threads: int) -> Iterator[Case]:
    for layer in layers(sizes):
        yield Case(
            SECTION,
            layer.name,
            partial(contenders, layer),
            (threads,),
            layer.flops(),
            headline=layer.dtype == "bfloat16",
        )


def contenders(layer: Layer) -> Contenders:
    torch.manual_seed(0)
    module, inputs = layer.module(), layer.inputs()
    ways = [it for it in WAYS if it != "batched_mm" or copied_bytes(layer) <= MOST_COPIES]
    run = training if layer.trains else forward
    makers: dict[str, Callable[[], Contender]] = {
        OURS: partial(run, partial(ours, module), module, inputs)
    }
    makers |= {name: partial(run, partial(theirs, module, name), module, inputs) for name in ways}
    if not layer.trains:
        for bits in (8, 4):
            makers[f"{OURS}, {bits} bits"] = partial(quantised, module, inputs, bits)
    return makers


def copied_bytes(layer: Layer) -> int:
    weights = 3 * layer.width * layer.intermediate * getattr(torch, layer.dtype).itemsize
    return layer.choices() * weights * (2 if layer.trains else 1)


def ours(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    return foo_ops.moe_experts(hidden, index, weights, module.gate_up_proj, module.down_proj)


def theirs(module: Any, way: str, *inputs: Tensor) -> Tensor:
    module.config._experts_implementation = way
    output: Tensor = module(*inputs)
    return output


def forward(function: Callable[..., Tensor], module: Any, inputs: tuple[Tensor, ...]) -> Local:
    return Local(lambda: function(*inputs), torch.no_grad)


def training(function: Callable[..., Tensor], module: Any, inputs: tuple[Tensor, ...]) -> Local:
    hidden, index, weights = inputs
    leaves = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    gradient = torch.ones_like(hidden)

    def step() -> tuple[Tensor, ...]:
        output = function(leaves[0], index, leaves[1])
        return torch.autograd.grad(output, [*leaves, *module.parameters()], gradient)

    return Local(step)


def quantised(module: Any, inputs: tuple[Tensor, ...], bits: int) -> Local:
    """Compute with weights of few bits, whose results differ and are not compared."""
    weights = []
    for weight in (module.gate_up_proj, module.down_proj):
        group_size = None if bits == 8 else 64
        parts = zip(*(foo_ops.quantize_weight(it, bits, group_size) for it in weight.detach()))
        weights += [torch.stack(part) for part in parts] + [None] * (bits == 8)
    contender = forward(
        lambda *given: foo_ops.moe_experts_quantized(*given, *weights), module, inputs
    )
    exact = forward(partial(ours, module), module, inputs)
    contender.results = exact.results  # type: ignore[method-assign]
    return contender
