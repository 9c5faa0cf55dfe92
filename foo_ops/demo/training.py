"""The text, and training on it: a step, a run, a comparison of two trainers' tokens per second."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor, nn

from foo_ops.demo.model import GPT, next_byte_loss

# --------------------------------------------------------------------------------------------- text

# Python's language reference, which its ``help()`` contains, as bytes.


HELD_OUT_SHARE = 0.1

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, both (batch, context) int64: each target is the byte after its input."""


@dataclass(frozen=True)
class Corpus:
    """Two stretches of text, each a uint8 tensor (bytes,) on the CPU."""

    train: Tensor
    validation: Tensor

    @classmethod
    def load(cls) -> Corpus:
        """Split the reference: the model never trains on its last tenth."""
        text = torch.frombuffer(bytearray(reference_text().encode()), dtype=torch.uint8)
        held_out = int(len(text) * HELD_OUT_SHARE)
        return cls(train=text[:-held_out], validation=text[-held_out:])

    def training_batches(self, batch: int, context: int, seed: int) -> Iterator[Batch]:
        """Yield random windows of the training text for ever; the same seed, the same windows."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
            yield windows(self.train, starts, context)

    def validation_batch(self, batch: int, context: int) -> Batch:
        """Return windows spread evenly over the held-out text, the same at each call."""
        starts = torch.linspace(0, len(self.validation) - context - 1, batch).long()
        return windows(self.validation, starts, context)


def reference_text() -> str:
    """Return all topics in order, without the paragraphs that several topics share.

    A fifth of the text occurs twice. A repeated paragraph would leak held-out text into training.
    """
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name].strip("\n") for name in sorted(topics)).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs))


def windows(text: Tensor, starts: Tensor, context: int) -> Batch:
    """Cut ``text`` (bytes,) at ``starts`` (batch,) into inputs and targets of ``context`` bytes."""
    spans = text[starts[:, None] + torch.arange(context + 1)].long()
    return spans[:, :-1], spans[:, 1:]


# ----------------------------------------------------------------------------------------- training


BATCH = 4
VALIDATION_BATCH = 32
VALIDATIONS = 20
PEAK_LEARNING_RATE = 3e-3
FINAL_LEARNING_RATE_SHARE = 0.05
MAX_WARM_UP_STEPS = 100
GRADIENT_NORM = 1.0

TEMPERATURE = 0.8
"""Below this, lines no longer end: a space is always likelier than a line break."""
CANDIDATES = 20

OPERATOR_NAMES = {"foo": "torch.ops.foo", "torch": "PyTorch's operators"}
DEVICES = ("cpu", "foo")


@dataclass(frozen=True)
class Setup:
    """The device and the operators of a model."""

    device: str
    operators: str
    compiled: bool

    def __str__(self) -> str:
        compiled = ", compiled" if self.compiled else ""
        return f"{OPERATOR_NAMES[self.operators]} on {self.device}{compiled}"

    def baseline(self) -> Setup:
        """Return the setup that one would use without foo_ops."""
        return replace(self, device="cpu", operators="torch")


@dataclass(frozen=True)
class Point:
    """Results of one training step."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the batch before the update, in nats per byte."""
    tokens_per_second: float | None
    """Median of the steps so far; None after the first, which compiles."""
    validation_loss: float | None
    """In nats per byte; None where it was not measured."""


class Trainer:
    """A model on a device, its optimiser and its learning-rate schedule over ``steps`` steps."""

    def __init__(self, model: GPT, setup: Setup, *, steps: int) -> None:
        self.model = model.to(setup.device)
        self.device = setup.device
        self.loss = next_byte_loss
        if setup.compiled:
            self.loss = torch.compile(next_byte_loss)
        self.optimiser = torch.optim.AdamW(
            parameter_groups(model), lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda step: learning_rate_share(step, steps)
        )

    def step(self, batch: Batch) -> float:
        """Update the weights once; return the loss before, in nats per byte."""
        inputs, targets = (tensor.to(self.device) for tensor in batch)
        loss = self.loss(self.model, inputs, targets)
        self.optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), GRADIENT_NORM)
        self.optimiser.step()
        self.schedule.step()
        return loss.item()

    def timed_step(self, batch: Batch) -> tuple[float, float]:
        """Return the loss and the seconds of one step. Reading the loss waits for the device."""
        start = time.perf_counter()
        loss = self.step(batch)
        return loss, time.perf_counter() - start


def parameter_groups(model: nn.Module) -> list[dict[str, object]]:
    """Apply weight decay to matrices, but not to gains and biases of the norms."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def learning_rate_share(step: int, steps: int) -> float:
    """Return the share of the peak learning rate at ``step``: linear warm-up, then a cosine."""
    warm_up = max(1, min(MAX_WARM_UP_STEPS, steps // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = (step - warm_up) / max(1, steps - warm_up)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine


def train(trainer: Trainer, corpus: Corpus, *, steps: int, seed: int) -> Iterator[Point]:
    """Train for ``steps`` steps and yield a point after each."""
    context = trainer.model.config.context
    held_out = corpus.validation_batch(VALIDATION_BATCH, context)
    validated = validation_steps(steps)
    durations: list[float] = []
    batches = islice(corpus.training_batches(BATCH, context, seed), steps)
    for step, batch in enumerate(batches, start=1):
        loss, duration = trainer.timed_step(batch)
        if step > 1:
            durations.append(duration)
        yield Point(
            step,
            loss,
            BATCH * context / statistics.median(durations) if durations else None,
            evaluate(trainer.model, trainer.device, held_out) if step in validated else None,
        )


def validation_steps(steps: int) -> set[int]:
    """Return up to ``VALIDATIONS`` evenly spaced steps, with the last one, and the first."""
    return {1, *(math.ceil(steps * share / VALIDATIONS) for share in range(1, VALIDATIONS + 1))}


@torch.no_grad()
def evaluate(model: GPT, device: str, batch: Batch) -> float:
    """Return the mean loss over ``batch`` in nats per byte."""
    inputs, targets = (tensor.to(device) for tensor in batch)
    return next_byte_loss(model, inputs, targets).item()


def compare_speed(trainers: Sequence[Trainer], batch: Batch, rounds: int) -> list[float]:
    """Return the tokens per second of each trainer on the same batch.

    The trainers take turns, so that a noisy neighbour slows them all; the median step counts. The
    first round compiles and is not counted.
    """
    durations = [[trainer.timed_step(batch)[1] for trainer in trainers] for _ in range(rounds + 1)]
    tokens = batch[0].numel()
    return [tokens / statistics.median(column) for column in zip(*durations[1:])]


@torch.no_grad()
def generate(model: GPT, device: str, prompt: bytes, length: int, *, seed: int) -> bytes:
    """Continue ``prompt`` by ``length`` bytes, each drawn from the likeliest candidates."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        window = tokens[:, -model.config.context :].to(device)
        logits, candidates = (model(window)[:, -1].cpu() / TEMPERATURE).topk(CANDIDATES)
        choice = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens = torch.cat((tokens, candidates.gather(1, choice)), dim=1)
    return bytes(tokens[0, len(prompt) :].tolist())
