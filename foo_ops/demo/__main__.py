"""The demo's command line, and its steps from the text to the comparison."""

from __future__ import annotations

import argparse
import importlib.util
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foo_ops.demo.model import ATTENTION, GPT, OPERATORS, GPTConfig
from foo_ops.demo.training import (
    BATCH,
    DEVICES,
    VALIDATION_BATCH,
    Batch,
    Corpus,
    Setup,
    Trainer,
    compare_speed,
    evaluate,
    generate,
    train,
)

EXTRAS = ("matplotlib", "rich")
PROMPT = b'The "foo" statement\n*******************\n\n'
SAMPLE_BYTES = 600
COMPARISON_ROUNDS = 30
DEFAULT_STEPS = 1700
"""About two minutes of training on 2 idle cores, at 70 ms a step."""

RELOAD_TOLERANCE = 1e-5
"""Relative; sums in another order differ by less than a tenth of this in float32."""


@dataclass(frozen=True)
class Options:
    """The command line."""

    device: str
    operators: str
    attention: str
    compile: bool
    steps: int
    seed: int
    output: Path


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    require_extras()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A sample may contain any character, and a log may support ASCII only.
        sys.stdout.reconfigure(errors="replace")
    run(options)


def parse_options(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m foo_ops.demo",
        description="Train a small GPT on Python's own documentation, then let it write some.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", choices=DEVICES, default="foo", help="where to train")
    add("--operators", choices=tuple(OPERATORS), default="foo", help="operators of the model")
    add("--attention", choices=ATTENTION, default=ATTENTION[0], help="flex: a learned score_mod")
    add("--compile", action="store_true", help="train through torch.compile")
    add("--steps", type=positive_number, default=DEFAULT_STEPS, help="number of training steps")
    add("--seed", type=seed_number, default=0, help="seed of weights, batches and sample")
    add("--output", type=writable_folder, default="demo_output", help="folder for the results")
    return Options(**vars(parser.parse_args(arguments)))


def positive_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def seed_number(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 to 2**63 - 1, got {text}")
    return int(text)


def writable_folder(text: str) -> Path:
    folder = Path(text)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"must be a folder, got {text} ({error.strerror})"
        raise argparse.ArgumentTypeError(reason) from error
    if not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"must be a writable folder, got {text}")
    return folder


def require_extras() -> None:
    missing = [name for name in EXTRAS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"foo_ops.demo needs {' and '.join(missing)}: pip install foo_ops[demo]")


def run(options: Options) -> None:
    """Train, save and reload, write, compare."""
    from rich.console import Console

    from foo_ops.demo import report

    console = Console(markup=False)
    setup = Setup(options.device, options.operators, options.compile)
    corpus = Corpus.load()
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(attention=options.attention), OPERATORS[setup.operators])
    console.print(introduction(setup, model, corpus))

    trainer = Trainer(model, setup, steps=options.steps)
    points = train(trainer, corpus, steps=options.steps, seed=options.seed)
    history = report.follow(console, points, options.steps)

    curve = options.output / "loss.png"
    report.save_loss_curve(history, f"Byte-level GPT: {setup}", curve)
    console.print(f"Loss curve: {curve}", soft_wrap=True)

    checkpoint = options.output / "checkpoint.pt"
    model.save(checkpoint)
    held_out = corpus.validation_batch(VALIDATION_BATCH, model.config.context)
    comparison = compare_reloaded(model, setup, checkpoint, held_out)
    console.print(f"Checkpoint: {checkpoint}, {comparison}", soft_wrap=True)

    written = generate(model, setup.device, PROMPT, SAMPLE_BYTES, seed=options.seed)
    console.print(report.sample_panel(PROMPT, written))
    if setup != setup.baseline():
        batch = next(corpus.training_batches(BATCH, model.config.context, options.seed))
        console.print(compare_with_baseline(setup, checkpoint, batch))


def introduction(setup: Setup, model: GPT, corpus: Corpus) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    slopes = ", and slopes of ALiBi" if model.config.attention == "flex" else ""
    return (
        f"A GPT of {parameters:,} parameters learns {len(corpus.train):,} bytes of Python's "
        f"documentation{slopes}: {setup}, {torch.get_num_threads()} threads."
    )


def compare_reloaded(model: GPT, setup: Setup, checkpoint: Path, batch: Batch) -> str:
    """Load the checkpoint on the CPU; its loss must equal the trained model's."""
    trained = evaluate(model, setup.device, batch)
    reloaded = evaluate(GPT.load(checkpoint, OPERATORS[setup.operators]), "cpu", batch)
    losses = f"loss on {setup.device} {trained:.6f}, reloaded on cpu {reloaded:.6f}"
    if not math.isclose(trained, reloaded, rel_tol=RELOAD_TOLERANCE):
        sys.exit(f"The checkpoint does not hold the model that was trained: {losses}")
    return losses


def compare_with_baseline(setup: Setup, checkpoint: Path, batch: Batch) -> str:
    """Compare the training speed with that of PyTorch's own CPU path."""
    baseline = setup.baseline()
    trainers = [
        Trainer(GPT.load(checkpoint, OPERATORS[each.operators]), each, steps=COMPARISON_ROUNDS)
        for each in (setup, baseline)
    ]
    ours, theirs = compare_speed(trainers, batch, COMPARISON_ROUNDS)
    return (
        f"Speed: {ours:,.0f} tokens/s with {setup}, {theirs:,.0f} with {baseline}: "
        f"{ours / theirs:.2f} times as fast."
    )


if __name__ == "__main__":
    main()
