"""A small mixture of experts learns the bytes of the demo's text: with foo's operators, and with
transformers' own experts by ``grouped_mm``. Both start from the same weights and see the same text.

The losses include the router's, which keeps experts equally busy. Run it with

    python examples/mixture.py --steps 200 --experts 32
"""

from __future__ import annotations

import argparse
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from side_by_side import positive, show
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import foo_ops.integrations.transformers as foo
from foo_ops.demo.training import Corpus

OURS, THEIRS = "apply", "grouped_mm"
LARGEST_DIFFERENCE = 0.02
"""Largest relative difference of the losses of the last steps: roundings add up in training."""
COMPARED = 10
"""Steps whose mean loss is compared."""


WIDTHS: dict[str, Any] = {"vocab_size": 256, "hidden_size": 256, "moe_intermediate_size": 128}
HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}


def mixture(experts: int, layers: int) -> Any:
    config = Qwen3MoeConfig(
        **WIDTHS,
        **HEADS,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=4,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(config)


def by_grouped_mm(model: Any) -> Any:
    model.set_experts_implementation(THEIRS)
    return model


# Losses with a router's part are the model's own.
CHANGES: dict[str, Callable[[Any], Any]] = {
    OURS: partial(foo.apply, fused_loss=False),
    THEIRS: by_grouped_mm,
}


class Training(NamedTuple):
    """The losses of all steps, and the tokens per second of the second half."""

    losses: list[float]
    rate: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--experts", type=positive, default=16)
    parser.add_argument("--layers", type=positive, default=2)
    parser.add_argument("--steps", type=positive, default=40)
    parser.add_argument("--batch", type=positive, default=4)
    parser.add_argument("--context", type=positive, default=256)
    options = parser.parse_args(arguments)

    model = mixture(options.experts, options.layers)
    models = {name: change(copy.deepcopy(model)) for name, change in CHANGES.items()}
    batches = texts(options.steps, options.batch, options.context)
    trained = train(models, batches, getattr(torch, options.dtype))
    theirs = trained[THEIRS]
    rows = [
        (
            name,
            f"{each.losses[0]:.3f}",
            f"{last_loss(each):.3f}",
            f"{each.rate:,.0f}",
            f"{each.rate / theirs.rate:.2f}",
        )
        for name, each in trained.items()
    ]
    title = (
        f"4 of {options.experts} experts in {options.layers} layers, {options.dtype}, "
        f"{torch.get_num_threads()} threads: {options.steps} steps of {options.batch} x "
        f"{options.context} bytes"
    )
    show(title, ("experts", "first loss", "last losses", "tokens/s", "x"), rows)
    check(trained)


def texts(steps: int, batch: int, context: int) -> list[Tensor]:
    batches = Corpus.load().training_batches(batch, context, seed=0)
    return [inputs for inputs, _ in itertools.islice(batches, steps)]


def train(models: dict[str, Any], batches: list[Tensor], dtype: torch.dtype) -> dict[str, Training]:
    """Train all models, which take turns with each step."""
    optimizers = {
        name: torch.optim.AdamW(model.train().parameters(), lr=1e-3, weight_decay=0.0)
        for name, model in models.items()
    }
    losses: dict[str, list[float]] = {name: [] for name in models}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for tokens in batches:
        for name, model in models.items():
            start = time.perf_counter()
            losses[name].append(step(model, optimizers[name], tokens, dtype))
            seconds[name].append(time.perf_counter() - start)
    # The first half compiles kernels, and loads them.
    middle = {name: statistics.median(each[len(each) // 2 :]) for name, each in seconds.items()}
    return {name: Training(losses[name], batches[0].numel() / middle[name]) for name in models}


def step(model: Any, optimizer: Any, tokens: Tensor, dtype: torch.dtype) -> float:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    return float(loss.item())


def last_loss(training: Training) -> float:
    return statistics.mean(training.losses[-COMPARED:])


def check(trained: dict[str, Training]) -> None:
    """End the program if the losses differ by more than roundings, or nothing was learned."""
    ours, theirs = (last_loss(trained[name]) for name in (OURS, THEIRS))
    if not abs(ours - theirs) <= LARGEST_DIFFERENCE * theirs:
        sys.exit(f"The losses differ: {ours:.3f} and {theirs:.3f}")
    if len(trained[OURS].losses) > COMPARED and ours >= trained[OURS].losses[0]:
        sys.exit(f"Nothing was learned: {ours:.3f} after {trained[OURS].losses[0]:.3f}")


if __name__ == "__main__":
    main()
