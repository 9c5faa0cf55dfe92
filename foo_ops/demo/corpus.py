"""The text: Python's language reference, which its ``help()`` contains, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

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
