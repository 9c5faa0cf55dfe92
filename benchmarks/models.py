"""Compares models of transformers, unchanged and with foo's operators applied.

`apply` must make no model slower, so each row has the unchanged model as a peer, ``torch``.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.llama_cpp import TYPES, LlamaCpp, write
from benchmarks.measure import OURS, Case, Contender, Contenders, Local
from foo_ops.testing.checks.matrix import threads as torch_threads

SECTION = "models"
AS_IT_IS = "torch"
"""The peer that is the unchanged model."""
DTYPES = ("bfloat16", "float32")
QUANTISED: dict[str, dict[str, Any]] = {"prefill": {"activations": 8}, "decoding": {}}
"""Phases that are run with weights of few bits, too, and the further options of `apply`."""
GGUF_WEIGHTS = "4 bits"
PHASES = ("prefill", "decoding", "training step")
WIDTHS = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}


@dataclass(frozen=True)
class EncoderSize:
    """A BERT, and its batches, each as the number of sequences and of their tokens."""

    widths: tuple[tuple[str, int], ...] = (
        *(("hidden_size", 768), ("num_attention_heads", 12), ("intermediate_size", 3072)),
        ("vocab_size", 30522),
    )
    layers: int = 4
    batches: tuple[tuple[int, int], ...] = ((8, 128), (2, 256))

    def model(self, dtype: str) -> Any:
        from transformers import BertConfig, BertForMaskedLM

        widths: dict[str, Any] = dict(self.widths)
        torch.manual_seed(0)
        model: Any = BertForMaskedLM(BertConfig(**widths, num_hidden_layers=self.layers))
        return model.to(getattr(torch, dtype)).eval()

    def tokens(self, *shape: int) -> Tensor:
        return random_tokens(dict(self.widths)["vocab_size"], shape)


@dataclass(frozen=True)
class MixtureSize:
    """Mixtures of experts, as Qwen3-MoE and gpt-oss are, and their numbers of tokens."""

    widths: tuple[tuple[str, int], ...] = (
        *(("hidden_size", 1024), ("vocab_size", 32000), ("num_attention_heads", 16)),
        *(("num_key_value_heads", 4), ("head_dim", 64), ("num_experts_per_tok", 4)),
    )
    intermediate: int = 512
    experts: int = 32
    layers: int = 2
    prompt: int = 768
    decoded: int = 8
    batch: int = 2
    context: int = 512

    def model(self, kind: str, dtype: str) -> Any:
        from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

        widths: dict[str, Any] = {**dict(self.widths), "num_hidden_layers": self.layers}
        config: Any
        if kind == GPT_OSS:
            widths |= {"intermediate_size": self.intermediate, "num_local_experts": self.experts}
            # Caches of a window cannot be cropped, as decoding one token again and again does.
            config = GptOssConfig(**widths, sliding_window=2 * self.prompt)
        else:
            widths |= {"moe_intermediate_size": self.intermediate, "num_experts": self.experts}
            config = Qwen3MoeConfig(**widths)
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(config)
        return model.to(getattr(torch, dtype)).eval()

    def tokens(self, *shape: int) -> Tensor:
        return random_tokens(dict(self.widths)["vocab_size"], shape)

    def count(self, phase: str) -> int:
        """Count the tokens of a call."""
        return {"prefill": self.prompt, "decoding": self.decoded}.get(
            phase, self.batch * self.context
        )


GPT_OSS = "gpt-oss"
MIXTURES = ("Qwen3-MoE", GPT_OSS)


@dataclass(frozen=True)
class Size:
    """A Llama, and its numbers of tokens.

    Attributes:
        prompt: tokens that are read at once; for decoding they are in the cache.
        decoded: tokens that a call decodes, one after the other.
        batch: sequences of a training step.
        context: tokens of each sequence.
        is_compiled: whether torch.compile is a contender, which takes a minute for each row.
        encoder, mixture: other models with their own rows.
    """

    widths: tuple[tuple[str, int], ...] = tuple(WIDTHS.items())
    layers: int = 4
    prompt: int = 768
    decoded: int = 8
    batch: int = 2
    context: int = 512
    is_compiled: bool = True
    encoder: EncoderSize = EncoderSize()
    mixture: MixtureSize = MixtureSize()

    def model(self, dtype: str) -> Any:
        # Imported only here: the import takes seconds, and other tables do not need it.
        from transformers import LlamaConfig, LlamaForCausalLM

        widths: dict[str, Any] = dict(self.widths)
        heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4}
        config = LlamaConfig(**widths, **heads, num_hidden_layers=self.layers)
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config)
        return model.to(getattr(torch, dtype)).eval()

    def tokens(self, *shape: int) -> Tensor:
        return random_tokens(dict(self.widths)["vocab_size"], shape)

    def count(self, phase: str) -> int:
        """Count the tokens of a call."""
        return {"prefill": self.prompt, "decoding": self.decoded}.get(
            phase, self.batch * self.context
        )


DEFAULT = Size()
QUICK = Size(
    widths=(("hidden_size", 64), ("intermediate_size", 96), ("vocab_size", 100)),
    layers=1,
    prompt=16,
    context=16,
    is_compiled=False,
    encoder=EncoderSize(
        widths=(
            *(("hidden_size", 64), ("num_attention_heads", 2), ("intermediate_size", 96)),
            ("vocab_size", 100),
        ),
        layers=1,
        batches=((2, 16), (1, 32)),
    ),
    mixture=MixtureSize(
        widths=(
            *(("hidden_size", 64), ("vocab_size", 100), ("num_attention_heads", 4)),
            *(("num_key_value_heads", 2), ("head_dim", 16), ("num_experts_per_tok", 2)),
        ),
        intermediate=32,
        experts=4,
        layers=1,
        prompt=16,
        context=16,
    ),
)


def random_tokens(vocabulary: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0))


def cases(size: Size, threads: int) -> Iterator[Case]:
    yield from decoder_cases(size, threads)
    yield gguf_case(size, threads)
    yield from encoder_cases(size.encoder, threads)
    yield from mixture_cases(size.mixture, threads)


def decoder_cases(size: Size, threads: int) -> Iterator[Case]:
    for dtype in DTYPES:
        for phase in PHASES:
            yield Case(
                SECTION,
                f"Llama {phase}, {dtype}",
                partial(contenders, size, dtype, phase, threads),
                (threads,),
                size.count(phase),
                headline=True,
            )


def gguf_case(size: Size, threads: int) -> Case:
    """Decode with the weights of a file, which llama.cpp reads as well."""
    name = f"Llama decoding, GGUF {TYPES[GGUF_WEIGHTS]}"
    return Case(
        SECTION, name, partial(gguf_contenders, size), (threads,), size.decoded, headline=True
    )


def encoder_cases(size: EncoderSize, threads: int) -> Iterator[Case]:
    """Measure encoding of each batch, and a training step with the first."""
    for dtype in DTYPES:
        for (batch, context), run, name in (
            *((batch, encoding, "") for batch in size.batches),
            (size.batches[0], encoder_step, " training step,"),
        ):
            yield Case(
                SECTION,
                f"BERT{name} {batch} x {context}, {dtype}",
                partial(encoder_contenders, size, dtype, (batch, context), run),
                (threads,),
                batch * context,
                headline=True,
            )


def mixture_cases(size: MixtureSize, threads: int) -> Iterator[Case]:
    for kind in MIXTURES:
        for phase in PHASES:
            yield Case(
                SECTION,
                f"{kind} {phase}, bfloat16",
                partial(mixture_contenders, size, kind, phase),
                (threads,),
                size.count(phase),
            )


def mixture_contenders(size: MixtureSize, kind: str, phase: str) -> Contenders:
    """Compare with the model as it is, whose experts transformers computes by ``grouped_mm``.

    Results are not compared: where a router finds experts equal, roundings choose others.
    """
    from foo_ops.integrations.transformers import apply

    model = size.model(kind, "bfloat16")
    run: Callable[..., Local] = PHASE_RUNS[phase]

    def ours() -> Local:
        contender = run(apply(copy.deepcopy(model)), size)
        contender.results = run(copy.deepcopy(model), size).results  # type: ignore[method-assign]
        return contender

    return {OURS: ours, AS_IT_IS: lambda: run(copy.deepcopy(model), size)}


def encoder_contenders(
    size: EncoderSize, dtype: str, batch: tuple[int, int], run: Callable[[Any, Tensor], Local]
) -> Contenders:
    from foo_ops.integrations.transformers import apply

    model, tokens = size.model(dtype), size.tokens(*batch)
    return {
        OURS: lambda: run(apply(copy.deepcopy(model)), tokens),
        AS_IT_IS: lambda: run(copy.deepcopy(model), tokens),
    }


def encoding(model: Any, tokens: Tensor) -> Local:
    return Local(lambda: model.base_model(tokens).last_hidden_state, torch.no_grad)


def encoder_step(model: Any, tokens: Tensor) -> Local:
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # so that results can be compared

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(tokens, labels=tokens).loss
        loss.backward()
        first = model.base_model.embeddings.LayerNorm.weight.grad
        return torch.cat((loss.detach().float()[None], first.float()))

    return Local(step)


def contenders(size: Size, dtype: str, phase: str, threads: int) -> Contenders:
    from foo_ops.integrations.transformers import apply

    model = size.model(dtype)
    run: Callable[..., Local] = PHASE_RUNS[phase]
    makers: dict[str, Callable[[], Contender]] = {
        OURS: lambda: run(apply(copy.deepcopy(model)), size),
        AS_IT_IS: lambda: run(copy.deepcopy(model), size),
    }
    if phase in QUANTISED:
        for bits in (8, 4):
            makers[f"{OURS}, {bits} bits"] = partial(quantised, model, size, phase, bits)
    if phase in ("prefill", "decoding"):
        makers |= by_llama_cpp(model, size, dtype, phase)
    if size.is_compiled:
        makers["compiled"] = lambda: ready(run(copy.deepcopy(model), size, torch.compile), threads)
    return makers


def ready(contender: Local, threads: int) -> Local:
    """Compile for a number of threads, which is a constant in the code."""
    torch.compiler.reset()
    with torch_threads(threads):
        results = contender.results()
    contender.results = lambda: results  # type: ignore[method-assign]
    return contender


def quantised(model: Any, size: Size, phase: str, bits: int) -> Local:
    """Compute with weights of few bits, with results that differ and are not compared."""
    from foo_ops.integrations.transformers import apply

    run: Callable[..., Local] = PHASE_RUNS[phase]
    step = run(apply(copy.deepcopy(model), quantize=bits, **QUANTISED[phase]), size)
    step.results = run(apply(copy.deepcopy(model)), size).results  # type: ignore[method-assign]
    return step


def by_llama_cpp(
    model: Any, size: Size, dtype: str, phase: str
) -> dict[str, Callable[[], Contender]]:
    """Run the same by llama.cpp, and decode with weights of few bits."""
    decodes = phase == "decoding"
    tokens = size.tokens(1, size.prompt + 1)[0].tolist()
    makers: dict[str, Callable[[], Contender]] = {
        "llama.cpp": partial(LlamaCpp, model, tokens, dtype, size.decoded if decodes else 0)
    }
    for bits in ("8 bits", "4 bits") if decodes else ():
        makers[f"llama.cpp, {bits}"] = partial(
            LlamaCpp, model, tokens, bits, size.decoded, lambda: decoding(model, size).results()
        )
    return makers


def gguf_contenders(size: Size) -> Contenders:
    """Compare with llama.cpp, and with the weights that transformers makes of the file.

    llama.cpp computes in other roundings, and its results are not compared.
    """
    from transformers import GgufConfig

    from foo_ops.integrations.transformers import apply

    model, tokens = size.model("bfloat16"), size.tokens(1, size.prompt + 1)[0].tolist()

    def as_it_is() -> Local:
        return decoding(loaded(model, quantization_config=GgufConfig(dequantize=True)), size)

    return {
        OURS: lambda: decoding(apply(loaded(model)), size),
        AS_IT_IS: as_it_is,
        "llama.cpp": partial(
            LlamaCpp, model, tokens, GGUF_WEIGHTS, size.decoded, lambda: as_it_is().results()
        ),
    }


def loaded(model: Any, **options: Any) -> Any:
    """Write a model to a file of llama.cpp, and load that."""
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder) / "model.gguf", model, GGUF_WEIGHTS)
        return AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", dtype=torch.bfloat16, **options
        )


def as_it_is(model: Any) -> Any:
    return model


def prefill(model: Any, size: Size | MixtureSize, wrap: Callable[[Any], Any] = as_it_is) -> Local:
    tokens, call = size.tokens(1, size.prompt), wrap(model)
    return Local(
        lambda: call(tokens, logits_to_keep=1, use_cache=False).logits, torch.no_grad, torch.clone
    )


def decoding(model: Any, size: Size | MixtureSize, wrap: Callable[[Any], Any] = as_it_is) -> Local:
    """Decode tokens after the prompt, and drop them again.

    The cache grows, as by default in transformers; for compilation it is static, so that one graph
    serves all lengths.
    """
    from transformers import DynamicCache, StaticCache

    tokens, call = size.tokens(1, size.prompt + 1), wrap(model)
    is_static = wrap is not as_it_is
    cache: Any = DynamicCache(config=model.config)
    if is_static:
        cache = StaticCache(config=model.config, max_cache_len=size.prompt + size.decoded)
    with torch.no_grad():
        model(tokens[:, :-1], past_key_values=cache, logits_to_keep=1)

    def step() -> Tensor:
        for _ in range(size.decoded):
            logits: Tensor = call(tokens[:, -1:], past_key_values=cache).logits
        if is_static:
            for layer in cache.layers:
                layer.cumulative_length.fill_(size.prompt)
        else:
            cache.crop(-size.decoded)
        return logits

    return Local(step, torch.no_grad)


def training_step(
    model: Any, size: Size | MixtureSize, wrap: Callable[[Any], Any] = as_it_is
) -> Local:
    tokens, call = size.tokens(size.batch, size.context), wrap(model.train())

    def step() -> Tensor:
        model.zero_grad()
        loss: Tensor = call(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        # Besides the loss, compares a gradient that has passed through all layers.
        return torch.cat((loss.detach().float()[None], model.model.norm.weight.grad.float()))

    return Local(step)


PHASE_RUNS = dict(zip(PHASES, (prefill, decoding, training_step)))
