"""Trains adapters (LoRA) on a model of quantised weights, beside the same on bfloat16 weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.loading import Measured
from benchmarks.measure import OURS, Case, Contenders, Local
from benchmarks.models import Size

SECTION, MEMORY = "adapters", "memory of adapters"
ON_BFLOAT16 = "bfloat16"
RANK = 16
TOKENS = 512
LEAST, LEAST_OF_MEMORY = 1 / 1.2, 1 / 0.4
"""Targets for our speed, and for how often our weights fit into the memory of the others."""


def cases(size: Size, threads: int) -> Iterator[Case]:
    tokens = min(TOKENS, size.context)
    for bits in (4, 8):
        name = f"Llama of {bits} bits, {tokens} tokens, rank {RANK}"
        for section, make, least in (
            (SECTION, contenders, LEAST),
            (MEMORY, memory_contenders, LEAST_OF_MEMORY if bits == 4 else None),
        ):
            prepare = partial(make, size, bits, tokens)
            yield Case(section, name, prepare, (threads,), least=least, repeat=2, headline=True)


def contenders(size: Size, bits: int, tokens: int) -> Contenders:
    """Compare the losses, which rounding to few bits changes little in a random model."""
    return {
        OURS: lambda: step_of(adapted(size, bits), size.tokens(1, tokens)),
        ON_BFLOAT16: lambda: step_of(adapted(size), size.tokens(1, tokens)),
    }


def memory_contenders(size: Size, bits: int, tokens: int) -> Contenders:
    return {
        OURS: partial(Measured, lambda: bytes_of_layers(adapted(size, bits))),
        ON_BFLOAT16: partial(Measured, lambda: bytes_of_layers(adapted(size))),
    }


def adapted(size: Size, bits: int | None = None) -> Any:
    """Return a model with adapters; with ``bits``, its layers have no other weights."""
    from peft import LoraConfig, get_peft_model

    from foo_ops.integrations.transformers import apply

    model = copy.deepcopy(size.model("bfloat16"))
    options: dict[str, Any] = {} if bits is None else {"quantize": bits, "keep_weights": False}
    config = LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(apply(model, **options), config).train()


def step_of(model: Any, tokens: Tensor) -> Local:
    trained = [it for it in model.parameters() if it.requires_grad]
    # Steps change nothing, so that contenders compute the same in all rounds.
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach().float()[None]

    return Local(step)


def bytes_of_layers(model: Any) -> float:
    """Count the bytes of the layers that have adapters, without these."""
    layers = (it.base_layer for it in model.modules() if hasattr(it, "base_layer"))
    tensors = (it for layer in layers for it in (*layer.parameters(), *layer.buffers()))
    return float(sum(it.numel() * it.element_size() for it in tensors))
