"""Compares tokens that a model decodes one after the other: as it is, and as a program.

A Llama of many narrow layers shows what comes between the operators. The rows of parts show where
the time of a token goes: in matrix products, attention, other operators, and between them, in
Python or in the program.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
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
    for llama, count, compilers in (
        (size.narrow, 1, COMPILERS),
        (size.wide, threads, COMPILERS_OF_WIDE),
    ):
        name = f"Llama {llama.layers} x {dict(llama.widths)['hidden_size']}, bfloat16"
        prepare = partial(contenders, llama, compilers, count)
        yield Case(SECTION, name, prepare, (count,), steps=llama.decoded, headline=True)
        for way, options in GENERATE.items():
            prepare = partial(generating, llama, size.tokens, options)
            yield Case(SECTION, f"{name}: {way}", prepare, (count,), steps=size.tokens)
    name = f"Whisper {dict(size.whisper)['d_model']}, {size.tokens} tokens, bfloat16"
    prepare = partial(whisper_contenders, size)
    yield Case(SECTION, name, prepare, (threads,), steps=size.tokens, headline=True)


class Profiled(Local):
    """Decodes tokens, and measures the parts of one by a profile of all."""

    def __init__(self, model: Any, size: models.Size) -> None:
        local = models.decoding(model, size)
        super().__init__(local.function, local.context)
        self.tokens = size.decoded

    def parts(self, threads: int) -> dict[str, float]:
        with torch_threads(threads), self.context():
            self.function()
            activities = [torch.profiler.ProfilerActivity.CPU]
            with (
                torch.profiler.profile(activities=activities) as found,
                torch.profiler.record_function(SECTION),
            ):
                self.function()
        # The tree has the sums of `key_averages`, which takes ten times as long.
        events = found.profiler.kineto_results.experimental_event_tree()
        seconds = dict.fromkeys(PARTS, 0.0)
        for event in events:
            children = event.children
            own = event.duration_time_ns - sum(it.duration_time_ns for it in children)
            seconds[part_of(event.name)] += own / 1e9 / self.tokens
            events += children
        return seconds


def part_of(name: str) -> str:
    """Return the part of a token to which an operator's time belongs, or the profile's own."""
    if name == SECTION:
        return "between operators"
    return next(part for part, words in PARTS.items() if any(word in name for word in words))


def in_all_ways(model: Any, run: Callable[[Any], Contender]) -> dict[str, Callable[[], Contender]]:
    """Run copies of a model as it is, with its operators replaced, and as a program."""
    from foo_ops.integrations.transformers import apply

    ways: dict[str, Callable[[Any], Any]] = {
        OURS: apply,
        FROM_PYTHON: partial(apply, decode=False),
        AS_IT_IS: models.as_it_is,
    }

    def made(change: Callable[[Any], Any]) -> Contender:
        return run(change(copy.deepcopy(model)))

    return {name: partial(made, change) for name, change in ways.items()}


def contenders(size: models.Size, compilers: Mapping[str, Compiler], threads: int) -> Contenders:
    model = size.model("bfloat16")

    def compiled(by: Compiler) -> Contender:
        return by(copy.deepcopy(model), size, threads)

    makers = in_all_ways(model, partial(Profiled, size=size))
    if size.is_compiled:
        makers |= {name: partial(compiled, by) for name, by in compilers.items()}
    return makers


# ------------------------------------------------------------------------------ by torch's compiler


def in_process(options: dict[str, Any], model: Any, size: models.Size, threads: int) -> Local:
    local = models.decoding(model, size, partial(torch.compile, options=options))
    return models.ready(local, threads)


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


def exported(model: Any, size: models.Size, threads: int) -> Local:
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

    return Local(run, torch.no_grad)


Compiler = Callable[[Any, models.Size, int], Local]
COMPILERS: dict[str, Compiler] = {
    "compiled": partial(in_process, {}),
    "compiled, C++ wrapper": partial(in_process, {"cpp_wrapper": True}),
    "AOTInductor": exported,
}
"""Each compiles a model for a number of threads."""
COMPILERS_OF_WIDE = {"compiled": COMPILERS["compiled"]}
"""Products take most of the time of wide layers: AOTInductor compiles for 90 s instead of 21, and
saves a tenth of a token."""


# -------------------------------------------------------------------------- generate, and Whisper


def generating(size: models.Size, count: int, options: dict[str, Any]) -> Contenders:
    """Compare tokens of `generate`, which also chooses each of them, after a short prompt."""
    model = size.model("bfloat16")
    model.generation_config.eos_token_id = None
    prompt = size.tokens(1, 8)

    def run(model: Any) -> Local:
        def tokens_of() -> Tensor:
            tokens = model.generate(prompt, max_new_tokens=count, pad_token_id=0, **options)
            # Models round differently, and so may choose other tokens.
            return torch.tensor(tokens.shape)

        tokens_of()
        return Local(tokens_of, torch.no_grad)

    return in_all_ways(model, run)


def whisper_contenders(size: Size) -> Contenders:
    """Decode with an encoder's states, from the first token on."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    widths: dict[str, Any] = dict(size.whisper)
    config = WhisperConfig(**widths, max_source_positions=size.frames, pad_token_id=0)
    torch.manual_seed(0)
    model: Any = WhisperForConditionalGeneration(config)
    model = model.to(torch.bfloat16).eval()
    hidden: Any = torch.randn(1, size.frames, config.d_model).bfloat16()

    def decoding(model: Any) -> Local:
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

        return Local(run, torch.no_grad)

    return in_all_ways(model, decoding)
