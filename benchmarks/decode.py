"""Compares tokens that a model decodes one after the other: as it is, and as a program.

A Llama of many narrow layers shows what comes between the operators. The rows of parts show where
the time of a token goes: in matrix products, attention, other operators, and between them, in
Python or in the program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import models
from benchmarks.measure import OURS, Case, Contender, Contenders, Local
from benchmarks.models import AS_IT_IS
from foo_ops.testing.checks.matrix import threads as torch_threads

SECTION = "decode"
FROM_PYTHON = "foo, from Python"
"""The same operators, without `apply(decode=True)`."""
COMPILED = {"compiled": {}, "compiled, C++ wrapper": {"cpp_wrapper": True}}
"""Ways to compile a model, with Inductor's options."""
PARTS = {
    "products": ("linear", "mm", "experts"),
    "attention": ("attention",),
    "other operators": ("",),
    "between operators": (),
}
"""Parts of a token, and words in the names of their operators; the first that fits counts."""
GENERATE: dict[str, dict[str, Any]] = {
    "generate, greedy": {"do_sample": False},
    "generate, top 50": {"do_sample": True, "top_k": 50},
}
"""Ways to choose tokens. What `generate` does before the first one is part of each."""


NARROW = models.Size(
    widths=(("hidden_size", 64), ("intermediate_size", 128), ("vocab_size", 256)),
    layers=24,
    prompt=64,
    decoded=64,
)


@dataclass(frozen=True)
class Size:
    """Models, and the length of the prompt that is in the cache."""

    narrow: models.Size = NARROW
    wide: models.Size = models.DEFAULT
    whisper: tuple[tuple[str, int], ...] = (
        *(("d_model", 384), ("encoder_layers", 4), ("decoder_layers", 4)),
        *(("encoder_attention_heads", 6), ("decoder_attention_heads", 6)),
        *(("encoder_ffn_dim", 1536), ("decoder_ffn_dim", 1536), ("vocab_size", 51865)),
    )
    frames: int = 1500
    tokens: int = 64


DEFAULT = Size()
QUICK = Size(
    narrow=replace(models.QUICK, layers=2),
    wide=models.QUICK,
    whisper=(
        *(("d_model", 64), ("encoder_layers", 1), ("decoder_layers", 1)),
        *(("encoder_attention_heads", 2), ("decoder_attention_heads", 2)),
        *(("encoder_ffn_dim", 64), ("decoder_ffn_dim", 64), ("vocab_size", 100)),
    ),
    frames=20,
    tokens=8,
)


def cases(size: Size, threads: int) -> Iterator[Case]:
    for llama in (size.narrow, size.wide):
        name = f"Llama {llama.layers} x {dict(llama.widths)['hidden_size']}, bfloat16"
        count = 1 if llama is size.narrow else threads
        yield Case(SECTION, name, partial(contenders, llama, count), (count,), headline=True)
        for part in PARTS:
            prepare = partial(parts, llama, part)
            yield Case(SECTION, f"{name}: {part}", prepare, (count,))
        for way, options in GENERATE.items():
            prepare = partial(generating, llama, size.tokens, options)
            yield Case(SECTION, f"{name}: {way}", prepare, (count,))
    name = f"Whisper {dict(size.whisper)['d_model']}, {size.tokens} tokens, bfloat16"
    yield Case(SECTION, name, partial(whisper_contenders, size), (threads,), headline=True)


class PerToken:
    """A contender of single tokens, of which it decodes several at a time."""

    def __init__(self, contender: Contender, tokens: int) -> None:
        self.contender, self.tokens = contender, tokens

    def results(self) -> list[Tensor]:
        return self.contender.results()

    def time(self, calls: int, threads: int) -> float:
        turns = -(-calls // self.tokens)
        return self.contender.time(turns, threads) * calls / (turns * self.tokens)


class Part(Local):
    """The time of some operators of a call, or of what is between all of them."""

    def __init__(self, local: Local, part: str) -> None:
        super().__init__(local.function, local.context)
        self.part = part

    def time(self, calls: int, threads: int) -> float:
        with torch_threads(threads), self.context():
            self.function()
            # One call for all: it takes the profiler longer to sum up the events.
            activities = [torch.profiler.ProfilerActivity.CPU]
            with (
                torch.profiler.profile(activities=activities) as found,
                torch.profiler.record_function(SECTION),
            ):
                self.function()
        parts = (it.self_cpu_time_total for it in found.key_averages() if self.has(it.key))
        return calls * sum(parts) / 1e6

    def has(self, name: str) -> bool:
        if name == SECTION:
            return self.part == "between operators"
        first = next(part for part, words in PARTS.items() if any(word in name for word in words))
        return self.part == first


def contenders(size: models.Size, threads: int) -> Contenders:
    from foo_ops.integrations.transformers import apply

    model = size.model("bfloat16")
    makers: dict[str, Callable[[], Contender]] = {
        OURS: lambda: tokens_of(apply(copy.deepcopy(model)), size),
        FROM_PYTHON: lambda: tokens_of(apply(copy.deepcopy(model), decode=False), size),
        AS_IT_IS: lambda: tokens_of(copy.deepcopy(model), size),
    }
    if size.is_compiled:
        for name, options in COMPILED.items():
            makers[name] = partial(compiled, model, size, options, threads)
        makers["AOTInductor"] = lambda: exported(copy.deepcopy(model), size, threads)
    return makers


def compiled(model: Any, size: models.Size, options: dict[str, Any], threads: int) -> PerToken:
    wrap = partial(torch.compile, options=options)
    local = models.decoding(copy.deepcopy(model), size, wrap)
    return PerToken(models.ready(local, threads), size.decoded)


class Exportable(torch.nn.Module):
    """A step of one token with a static cache whose tensors are buffers, as torch.export needs."""

    def __init__(self, model: Any, length: int) -> None:
        from transformers import StaticCache

        super().__init__()
        self.model = model
        self.cache: Any = StaticCache(config=model.config, max_cache_len=length)
        heads = model.config.num_key_value_heads
        self.cache.early_initialization(1, heads, model.config.head_dim, model.dtype, model.device)
        for number, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                self.register_buffer(f"{name}_{number}", getattr(layer, name), persistent=False)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        for number, layer in enumerate(self.cache.layers):
            for name in ("keys", "values", "cumulative_length"):
                setattr(layer, name, getattr(self, f"{name}_{number}"))
            layer.cumulative_length.copy_(position)
        logits: Tensor = self.model(tokens, past_key_values=self.cache).logits
        return logits


def exported(model: Any, size: models.Size, threads: int) -> PerToken:
    """Compile ahead of time, for one length of the cache and these weights."""
    tokens = size.tokens(1, size.prompt + 1)
    positions = [torch.tensor(it) for it in range(size.prompt + size.decoded)]
    module = Exportable(model, len(positions)).eval()
    with torch_threads(threads), torch.no_grad():
        program = torch.export.export(module, (tokens[:, :1], positions[0]), strict=False)
        package = torch._inductor.aoti_compile_and_package(
            program, inductor_configs={"max_autotune": True}
        )
        step = torch._inductor.aoti_load_package(package)
        for token, position in zip(tokens.split(1, 1), positions[: size.prompt]):
            step(token, position)

    def run() -> Tensor:
        for position in positions[size.prompt :]:
            logits: Tensor = step(tokens[:, -1:], position)
        return logits

    return PerToken(Local(run, torch.no_grad), size.decoded)


def tokens_of(model: Any, size: models.Size) -> PerToken:
    return PerToken(models.decoding(model, size), size.decoded)


def parts(size: models.Size, part: str) -> Contenders:
    """Compare a part of a token, as the profiler measures it."""
    from foo_ops.integrations.transformers import apply

    model = size.model("bfloat16")

    def made(change: Callable[[Any], Any]) -> PerToken:
        return PerToken(
            Part(models.decoding(change(copy.deepcopy(model)), size), part), size.decoded
        )

    return {
        OURS: lambda: made(apply),
        FROM_PYTHON: lambda: made(partial(apply, decode=False)),
        AS_IT_IS: lambda: made(models.as_it_is),
    }


def generating(size: models.Size, count: int, options: dict[str, Any]) -> Contenders:
    """Compare tokens of `generate`, which also chooses each of them, after a short prompt."""
    from foo_ops.integrations.transformers import apply

    model = size.model("bfloat16")
    model.generation_config.eos_token_id = None
    prompt = size.tokens(1, 8)

    def made(change: Callable[[Any], Any]) -> PerToken:
        changed = change(copy.deepcopy(model))

        def run() -> Tensor:
            tokens = changed.generate(prompt, max_new_tokens=count, pad_token_id=0, **options)
            # Models round differently, and so may choose other tokens.
            return torch.tensor(tokens.shape)

        run()
        return PerToken(Local(run, torch.no_grad), count)

    return {
        OURS: lambda: made(apply),
        FROM_PYTHON: lambda: made(partial(apply, decode=False)),
        AS_IT_IS: lambda: made(models.as_it_is),
    }


def whisper_contenders(size: Size) -> Contenders:
    """Decode with an encoder's states, from the first token on."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    from foo_ops.integrations.transformers import apply

    widths: dict[str, Any] = dict(size.whisper)
    config = WhisperConfig(**widths, max_source_positions=size.frames, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = WhisperForConditionalGeneration(config)
    model = model.to(torch.bfloat16).eval()
    hidden: Any = torch.randn(1, size.frames, config.d_model).bfloat16()

    def decoding(model: Any) -> PerToken:
        def run() -> Tensor:
            cache = None
            token = torch.full((1, 1), 3)
            for _ in range(size.tokens):
                output = model(
                    encoder_outputs=BaseModelOutput(hidden),
                    decoder_input_ids=token,
                    past_key_values=cache,
                )
                cache = output.past_key_values
            return output.logits

        return PerToken(Local(run, torch.no_grad), size.tokens)

    return {
        OURS: lambda: decoding(apply(copy.deepcopy(model))),
        AS_IT_IS: lambda: decoding(copy.deepcopy(model)),
    }
