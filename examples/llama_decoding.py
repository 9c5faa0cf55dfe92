"""A small Llama reads a prompt and decodes with a cache, with "foo" and with "sdpa" attention.

Its weights are random, since only speed is of interest. The tokens that it is given are random,
too, and not those that it would choose, so that both do the same work. Run it with
``make examples``, or

    python examples/llama_decoding.py --prompt 4096 --dtype bfloat16
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from side_by_side import median_seconds, positive, show
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import foo_ops.integrations.transformers  # noqa: F401  (registers "foo")

IMPLEMENTATIONS = ("foo", "sdpa")
VOCABULARY = 1000

LARGEST_DIFFERENCE = 16
"""Between the logits, in units of the dtype's roundoff and of the largest logit."""


class Decoder:
    """The model with one implementation of attention, and the cache with the prompt."""

    def __init__(self, implementation: str, device: str, dtype: torch.dtype) -> None:
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=2,
            max_position_embeddings=2**20,
        )
        torch.manual_seed(0)
        # Type checkers do not follow the decorator that transformers puts on Module.to.
        self.model = cast(Any, LlamaForCausalLM(config)).to(device=device, dtype=dtype).eval()
        self.model.set_attn_implementation(implementation)
        self.cache = DynamicCache(config=config)

    @torch.no_grad()
    def prefill(self, prompt: Tensor) -> Tensor:
        """Return the logits of the last token, (1, vocabulary); the cache then holds the prompt."""
        self.cache = DynamicCache(config=self.model.config)
        return self.step(prompt)

    @torch.no_grad()
    def decode(self, continuation: Tensor) -> Tensor:
        """Return logits after each token, (tokens, vocabulary), and leave the cache as it was."""
        logits = [self.step(token) for token in continuation.split(1, dim=1)]
        self.cache.crop(-continuation.shape[1])
        return torch.cat(logits)

    def step(self, tokens: Tensor) -> Tensor:
        output = self.model(
            tokens.to(self.model.device), past_key_values=self.cache, logits_to_keep=1
        )
        return output.logits[:, -1].float().cpu()


class Measurement(NamedTuple):
    """The tokens per second of one implementation, and its logits."""

    prefill: float
    decoding: float
    logits: Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "foo"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="to decode")
    parser.add_argument("--rounds", type=positive, default=3, help="of the comparison of speed")
    options = parser.parse_args(arguments)

    dtype = getattr(torch, options.dtype)
    decoders = {name: Decoder(name, options.device, dtype) for name in IMPLEMENTATIONS}
    measured = measure(decoders, options.prompt, options.tokens, options.rounds)
    title = (
        f"Llama, {options.dtype} on {options.device}, {torch.get_num_threads()} threads: "
        f"a prompt of {options.prompt} tokens, then {options.tokens} one by one"
    )
    show_comparison(title, measured)
    check(measured, dtype)


def measure(
    decoders: dict[str, Decoder], prompt_length: int, tokens: int, rounds: int
) -> dict[str, Measurement]:
    prompt = torch.randint(VOCABULARY, (1, prompt_length))
    continuation = torch.randint(VOCABULARY, (1, tokens))
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
    rows = [
        (name, f"{each.prefill:,.0f}", f"{each.decoding:,.1f}") for name, each in measured.items()
    ]
    ours, theirs = (measured[name] for name in IMPLEMENTATIONS)
    ratio = (f"{ours.prefill / theirs.prefill:.2f}", f"{ours.decoding / theirs.decoding:.2f}")
    rows.append((" / ".join(IMPLEMENTATIONS), *ratio))
    show(title, ("attention", "prefill, tokens/s", "decoding, tokens/s"), rows)


def check(measured: dict[str, Measurement], dtype: torch.dtype) -> None:
    """End the program if the logits differ by more than rounding."""
    ours, theirs = (measured[name].logits for name in IMPLEMENTATIONS)
    difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    print(f"Largest difference of the logits, relative to the largest logit: {difference:.1e}")
    if difference > LARGEST_DIFFERENCE * torch.finfo(dtype).eps:
        sys.exit(f"The logits differ: {difference:.1e}")


if __name__ == "__main__":
    main()
