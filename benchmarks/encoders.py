"""Compares an embedding model on texts of different lengths with ONNX Runtime and transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import OURS, Case, Contenders, Local
from examples.onnx_runtime import OnnxEncoder

SECTION = "encoders"
AS_IT_IS = "torch"
ONNX_RUNTIME = "ONNX Runtime"
LEAST = 1.5
"""Target for our speed relative to the best of the two."""


@dataclass(frozen=True)
class Size:
    """A BERT of all-MiniLM-L6's widths, and the lengths of its texts, in tokens."""

    widths: tuple[tuple[str, int], ...] = (
        *(("hidden_size", 384), ("num_attention_heads", 12), ("intermediate_size", 1536)),
        *(("vocab_size", 30522), ("num_hidden_layers", 6)),
    )
    texts: int = 64
    longest: int = 96

    def lengths(self) -> Tensor:
        """Most texts are short, as sentences are; the mean is 0.4 of the longest."""
        shares = torch.linspace(0, 1, self.texts) ** 2
        return (5 + shares * (self.longest - 5)).round().long()

    def inputs(self) -> dict[str, Tensor]:
        shown = torch.arange(self.longest) < self.lengths()[:, None]
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(1, dict(self.widths)["vocab_size"], shown.shape, generator=generator)
        return {
            "input_ids": ids * shown,
            "attention_mask": shown.long(),
            "token_type_ids": torch.zeros_like(ids),
        }

    def model(self, dtype: str, **options: Any) -> Any:
        from transformers import BertConfig, BertModel

        widths: dict[str, Any] = dict(self.widths)
        torch.manual_seed(0)
        model: Any = BertModel(BertConfig(**widths, **options))
        return model.to(getattr(torch, dtype)).eval()


DEFAULT = Size()
QUICK = Size(
    widths=(
        *(("hidden_size", 64), ("num_attention_heads", 2), ("intermediate_size", 96)),
        *(("vocab_size", 100), ("num_hidden_layers", 1)),
    ),
    texts=4,
    longest=16,
)


def cases(size: Size, threads: int) -> Iterator[Case]:
    for dtype in ("float32", "bfloat16"):
        yield Case(
            SECTION,
            f"{size.texts} texts of 5 to {size.longest} tokens, {dtype}",
            partial(contenders, size, dtype, threads),
            (threads,),
            int(size.lengths().sum()),
            least=LEAST,
            headline=True,
        )


def contenders(size: Size, dtype: str, threads: int) -> Contenders:
    from foo_ops.integrations.transformers import apply

    model, inputs = size.model(dtype), size.inputs()

    def encoder(model: Any) -> Callable[[Mapping[str, Tensor]], Tensor]:
        return lambda inputs: model(**inputs).last_hidden_state

    makers = {
        OURS: lambda: embedding(encoder(apply(copy.deepcopy(model), packing=True)), inputs),
        AS_IT_IS: lambda: embedding(encoder(copy.deepcopy(model)), inputs),
    }
    if dtype == "float32":
        # CPUs of ONNX Runtime have no kernels for bfloat16.
        eager = partial(size.model, dtype, attn_implementation="eager")
        makers[ONNX_RUNTIME] = lambda: embedding(OnnxEncoder(eager(), inputs, threads), inputs)
    return makers


def embedding(
    encoder: Callable[[Mapping[str, Tensor]], Tensor], inputs: Mapping[str, Tensor]
) -> Local:
    """Return the means over the tokens of each text."""
    shown = inputs["attention_mask"][..., None]

    def run() -> Tensor:
        return (encoder(inputs) * shown).sum(1) / shown.sum(1)

    return Local(run, torch.no_grad)
