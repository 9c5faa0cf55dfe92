"""A Llama of the size of a small chat model reads a prompt and decodes with a cache: as it is, with
foo's attention, with all of foo's operators that `apply` gives it, and with weights of 8 or 4 bits.

Its weights are random, since only speed matters. Its tokens are random, too, not those that it
would choose, so that all contenders do the same work. Run it with ``make examples``, or

    python examples/llama_decoding.py --prompt 4096 --dtype float32
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from side_by_side import median_seconds, positive, show
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import foo_ops.integrations.transformers as foo

OURS, THEIRS = "apply", "as it is"
WIDTHS: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2816, "vocab_size": 32000}

LARGEST_DIFFERENCE = 16
"""Largest difference of logits, in roundoffs of the largest logit.

Weights of 8 and 4 bits are rounded by more.
"""


def only_attention(model: Any) -> Any:
    model.set_attn_implementation("foo")
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    OURS: foo.apply,
    "apply, 8 bits": partial(foo.apply, quantize=8),
    "apply, 4 bits": partial(foo.apply, quantize=4),
    "attention": only_attention,
    THEIRS: lambda model: model,
}


def llama(layers: int, device: str, dtype: torch.dtype) -> Any:
    heads: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 4}
    config = LlamaConfig(**WIDTHS, **heads, num_hidden_layers=layers, max_position_embeddings=2**20)
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.to(device=device, dtype=dtype).eval()


def twin(model: Any) -> Any:
    """Copy the modules of a model, but not its weights."""
    return copy.deepcopy(model, {id(it): it for it in model.parameters()})


class Decoder:
    """A model, and the cache with the prompt."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    @torch.no_grad()
    def prefill(self, prompt: Tensor) -> Tensor:
        """Read the prompt into the cache; return the logits of the last token, (1, vocabulary)."""
        self.cache = DynamicCache(config=self.model.config)
        return self.step(prompt)

    @torch.no_grad()
    def decode(self, continuation: Tensor) -> Tensor:
        """Return the logits after each token, (tokens, vocabulary), and restore the cache."""
        logits = [self.step(token) for token in continuation.split(1, dim=1)]
        self.cache.crop(-continuation.shape[1])
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        output = self.model(
            tokens.to(self.model.device), past_key_values=self.cache, logits_to_keep=1
        )
        return output.logits[:, -1].float().cpu()


class Measurement(NamedTuple):
    """The tokens per second of one model, and its logits."""

    prefill: float
    decoding: float
    logits: Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "foo"), default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--prompt", type=positive, default=1024, help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="to decode")
    parser.add_argument("--rounds", type=positive, default=3, help="of the comparison of speed")
    options = parser.parse_args(arguments)

    dtype = getattr(torch, options.dtype)
    model = llama(options.layers, options.device, dtype)
    decoders = {name: Decoder(change(twin(model))) for name, change in CHANGES.items()}
    measured = measure(decoders, options.prompt, options.tokens, options.rounds)
    title = (
        f"Llama of {options.layers} layers, {options.dtype} on {options.device}, "
        f"{torch.get_num_threads()} threads: a prompt of {options.prompt} tokens, "
        f"then {options.tokens} one by one"
    )
    show_comparison(title, measured)
    check(measured, dtype)


def measure(
    decoders: dict[str, Decoder], prompt_length: int, tokens: int, rounds: int
) -> dict[str, Measurement]:
    prompt = torch.randint(WIDTHS["vocab_size"], (1, prompt_length))
    continuation = torch.randint(WIDTHS["vocab_size"], (1, tokens))
    prefill = median_seconds(
        {name: partial(each.prefill, prompt) for name, each in decoders.items()}, rounds
    )
    decoding = median_seconds(
        {name: partial(each.decode, continuation) for name, each in decoders.items()}, rounds
    )
    return {
        name: Measurement(
            prompt_length / prefill[name], tokens / decoding[name], decoder.decode(continuation)
        )
        for name, decoder in decoders.items()
    }


def show_comparison(title: str, measured: dict[str, Measurement]) -> None:
    theirs = measured[THEIRS]
    rows = [
        (
            name,
            f"{each.prefill:,.0f}",
            f"{each.decoding:,.1f}",
            f"{each.prefill / theirs.prefill:.2f}",
            f"{each.decoding / theirs.decoding:.2f}",
            f"{difference(each, theirs):.1e}",
        )
        for name, each in measured.items()
    ]
    header = ("model", "prefill, tokens/s", "decoding, tokens/s", "prefill x", "decoding x")
    show(title, (*header, "logits off by"), rows)
    print(f"x: beside the model {THEIRS}; off by: the most, relative to the largest logit")


def difference(one: Measurement, other: Measurement) -> float:
    """Return the largest difference of the logits, relative to the largest logit."""
    return ((one.logits - other.logits).abs().max() / other.logits.abs().max()).item()


def check(measured: dict[str, Measurement], dtype: torch.dtype) -> None:
    """End the program if the logits differ by more than rounding."""
    off = difference(measured[OURS], measured[THEIRS])
    if off > LARGEST_DIFFERENCE * torch.finfo(dtype).eps:
        sys.exit(f"The logits differ: {off:.1e}")


if __name__ == "__main__":
    main()
