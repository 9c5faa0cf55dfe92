"""Compares foo::moe_experts with the ways that transformers has to compute experts.

`apply` of whole mixtures is in the table of models.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

import foo_ops
from benchmarks import peaks
from benchmarks.measure import OURS, Case, Contender, Contenders, Local

SECTION, FEW_TOKENS = "experts", "experts of few tokens"
WAYS = ("eager", "batched_mm", "grouped_mm")
DTYPES = ("bfloat16", "float32")
MOST_COPIES = 2**30
"""``batched_mm`` copies the weights of each choice: with more bytes it is left out."""
TOKENS = (1, 8, 768)
BITS = {"bfloat16": None, "8 bits": 8, "4 bits": 4, "MXFP4": "mxfp4"}
"""Kinds of weights whose reading is measured."""
BYTES = {"bfloat16": 2, "8 bits": 1, "4 bits": 0.5 + 2 * 2 / 64, "MXFP4": 0.5 + 1 / 32}
"""Bytes of a weight, with its share of scales and zeros, but not of a row's scale for 8 bits."""
READ_TARGET = 0.70
"""Fraction of the read bandwidth to reach with 1 and 8 tokens."""
PEER = "grouped_mm"


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

    def read_bytes(self, kind: str) -> float:
        """Count the bytes of the weights of the choices, with scales and zeros."""
        return BYTES[kind] * self.choices() * 3 * self.width * self.intermediate

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

    for tokens in (it for it in sizes if it <= MOST_READ):
        layer = Layer("bfloat16", tokens)
        for kind in BITS:
            yield Case(
                FEW_TOKENS,
                f"experts of {kind}, {tokens} x {layer.top_k} of {layer.experts}",
                partial(reading, layer, kind),
                (threads,),
                layer.read_bytes(kind),
                references=peaks.references(peaks.READ),
                headline=True,
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


Weights = list[Tensor | None]


def stored(module: Any, bits: int | str | None) -> Weights:
    """Return the weights as they are stored, with scales and zeros."""
    weights: Weights = []
    for weight in (module.gate_up_proj.detach(), module.down_proj.detach()):
        if bits is None:
            weights.append(weight)
        elif bits == "mxfp4":
            weights += [*foo_ops.quantize_mxfp4(weight), None]
        else:
            group_size = 64 if bits == 4 else None
            parts = foo_ops.quantize_weight(weight.flatten(0, 1), int(bits), group_size)
            weights += [it.unflatten(0, weight.shape[:2]) for it in parts]
            weights += [None] * (bits == 8)
    return weights


def quantised(module: Any, inputs: tuple[Tensor, ...], bits: int) -> Local:
    """Compute with weights of few bits, whose results differ and are not compared."""
    weights = stored(module, bits)
    contender = forward(
        lambda *given: foo_ops.moe_experts_quantized(*given, *weights), module, inputs
    )
    exact = forward(partial(ours, module), module, inputs)
    contender.results = exact.results  # type: ignore[method-assign]
    return contender


# --------------------------------------------------------------------------- reading of weights

MOST_READ = 8
"""With more tokens, multiplying takes longer than reading."""


def reading(layer: Layer, kind: str) -> Contenders:
    """Compute a few tokens, each time with experts that are in no cache."""
    torch.manual_seed(0)
    module, bits = layer.module(), BITS[kind]
    weights = stored(module, bits)
    if bits is not None:
        widened = dequantised(weights, getattr(torch, layer.dtype))
        module.gate_up_proj.data, module.down_proj.data = widened
    operator = foo_ops.moe_experts if bits is None else foo_ops.moe_experts_quantized

    def peer(*given: Any) -> Tensor:
        hidden, index, scores, module.gate_up_proj.data, module.down_proj.data = given
        return theirs(module, PEER, hidden, index, scores)

    dense: Weights = [module.gate_up_proj.data, module.down_proj.data]
    hidden, _, scores = layer.inputs()
    return {
        OURS: partial(in_turns, operator, layer, hidden, scores, weights),
        PEER: partial(in_turns, peer, layer, hidden, scores, dense),
    }


def in_turns(
    function: Callable[..., Tensor], layer: Layer, hidden: Tensor, scores: Tensor, weights: Weights
) -> Local:
    """Choose all experts of all copies in turns."""
    choices = torch.arange(layer.choices() * layer.experts) % layer.experts
    indices = choices.view(-1, layer.tokens, layer.top_k)[: layer.experts]
    size = sum(it.nbytes for it in weights if it is not None)
    copies = -(-peaks.bytes_beyond_the_caches() // size)
    clones = [weights, *(clone(weights) for _ in range(copies - 1))]
    following = itertools.cycle(itertools.product(clones, indices))

    def call() -> Tensor:
        parts, index = next(following)
        return function(hidden, index, scores, *parts)

    return Local(call, torch.no_grad)


def clone(weights: Weights) -> Weights:
    return [None if it is None else it.clone() for it in weights]


def dequantised(weights: Weights, dtype: torch.dtype) -> list[Tensor]:
    from foo_ops.ops.experts.quantized import dequantized

    up, up_scale, up_zero, down, down_scale, down_zero = cast("list[Any]", weights)
    return [
        dequantized(up, up_scale, up_zero, dtype),
        dequantized(down, down_scale, down_zero, dtype),
    ]
