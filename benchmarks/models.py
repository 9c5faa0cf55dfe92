"""Compare models of transformers as they are with the same that foo's operators were applied to."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama_cpp import LlamaCpp
from benchmarks.measure import OURS, Case, Contender, Contenders, Local

SECTION = "models"
PHASES = ("prefill", "decoding", "training step")
WIDTHS = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}


@dataclass(frozen=True)
class Size:
    """A Llama, and the tokens that it is given.

    Attributes:
        prompt: how many are read at once; for decoding they are in the cache.
        batch: sequences of a training step.
        context: their tokens.
        is_compiled: whether torch.compile takes part, which takes a minute for each row.
    """

    widths: tuple[tuple[str, int], ...] = tuple(WIDTHS.items())
    layers: int = 4
    prompt: int = 768
    batch: int = 2
    context: int = 512
    is_compiled: bool = True

    def model(self, dtype: str) -> Any:
        # Imported where it is needed: it takes seconds, and is no part of the other tables.
        from transformers import LlamaConfig, LlamaForCausalLM

        widths: dict[str, Any] = dict(self.widths)
        heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4}
        config = LlamaConfig(**widths, **heads, num_hidden_layers=self.layers)
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        return model.to(getattr(torch, dtype)).eval()

    def tokens(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(dict(self.widths)["vocab_size"], shape, generator=generator)

    def count(self, phase: str) -> int:
        """Count the tokens of a call."""
        return {"prefill": self.prompt, "decoding": 1}.get(phase, self.batch * self.context)


DEFAULT = Size()
QUICK = Size(
    widths=(("hidden_size", 64), ("intermediate_size", 96), ("vocab_size", 100)),
    layers=1,
    prompt=16,
    context=16,
    is_compiled=False,
)


def cases(size: Size, threads: int) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        for phase in PHASES:
            yield Case(
                SECTION,
                f"Llama {phase}, {dtype}",
                partial(contenders, size, dtype, phase, threads),
                (threads,),
                size.count(phase),
                headline=True,
            )


def contenders(size: Size, dtype: str, phase: str, threads: int) -> Contenders:
    from foo_ops.integrations.transformers import apply

    model = size.model(dtype)
    run = {"prefill": prefill, "decoding": decoding}.get(phase, training_step)
    makers: dict[str, Callable[[], Contender]] = {
        OURS: lambda: run(apply(copy.deepcopy(model)), size),
        "torch": lambda: run(copy.deepcopy(model), size),
    }
    if phase == "decoding":
        for bits in (8, 4):
            makers[f"{OURS}, {bits} bits"] = partial(quantised, model, size, bits)
    if phase in ("prefill", "decoding"):
        makers |= by_llama_cpp(model, size, dtype, phase)
    if size.is_compiled:
        makers["compiled"] = lambda: ready(run(copy.deepcopy(model), size, torch.compile), threads)
    return makers


def ready(contender: Local, threads: int) -> Local:
    """Compile for a number of threads, which the code has as a constant."""
    torch.compiler.reset()
    contender.time(1, threads)
    return contender


def quantised(model: Any, size: Size, bits: int) -> Local:
    """Decode with weights of few bits; its results are others, so that they are not compared."""
    from foo_ops.integrations.transformers import apply

    step = decoding(apply(copy.deepcopy(model), quantize=bits), size)
    step.results = decoding(apply(copy.deepcopy(model)), size).results  # type: ignore[method-assign]
    return step


def by_llama_cpp(
    model: Any, size: Size, dtype: str, phase: str
) -> dict[str, Callable[[], Contender]]:
    """Let llama.cpp do the same, and decode with weights of few bits."""
    decodes = phase == "decoding"
    tokens = size.tokens(1, size.prompt + 1)[0].tolist()
    makers: dict[str, Callable[[], Contender]] = {
        "llama.cpp": partial(LlamaCpp, model, tokens, dtype, decodes)
    }
    for bits in ("8 bits", "4 bits") if decodes else ():
        makers[f"llama.cpp, {bits}"] = partial(
            LlamaCpp, model, tokens, bits, decodes, lambda: decoding(model, size).results()
        )
    return makers


def as_it_is(model: Any) -> Any:
    return model


def prefill(model: Any, size: Size, wrap: Callable[[Any], Any] = as_it_is) -> Local:
    tokens, call = size.tokens(1, size.prompt), wrap(model)
    return Local(
        lambda: call(tokens, logits_to_keep=1, use_cache=False).logits, torch.no_grad, torch.clone
    )


def decoding(model: Any, size: Size, wrap: Callable[[Any], Any] = as_it_is) -> Local:
    """Decode one token after the prompt, again and again.

    The cache grows, as transformers does it by default; compiled it is static, so that one graph
    serves all lengths.
    """
    from transformers import DynamicCache, StaticCache

    tokens, call = size.tokens(1, size.prompt + 1), wrap(model)
    is_static = wrap is not as_it_is
    cache: Any = DynamicCache(config=model.config)
    if is_static:
        cache = StaticCache(config=model.config, max_cache_len=size.prompt + 1)
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache, logits_to_keep=1)

    def step() -> Tensor:
        logits: Tensor = call(tokens[:, -1:], past_key_values=cache).logits
        if is_static:
            for layer in cache.layers:
                layer.cumulative_length.fill_(size.prompt)
        else:
            cache.crop(-1)
        return logits

    return Local(step, torch.no_grad)


def training_step(model: Any, size: Size, wrap: Callable[[Any], Any] = as_it_is) -> Local:
    tokens, call = size.tokens(size.batch, size.context), wrap(model.train())

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = call(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        # With the loss a gradient is compared that has gone through all layers.
        return torch.cat((loss.detach().float()[None], model.model.norm.weight.grad.float()))

    return Local(step)
