"""A GPT on bytes that takes its attention as an argument.

Shapes: B sequences in a batch, S bytes in a sequence, W width, H heads, D = W / H.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""Every byte is a token."""

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention: query, key and value (B, H, S, D) to output (B, H, S, D)."""


def foo_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output, _logsumexp = torch.ops.foo.attention(query, key, value, is_causal=True)
    return output


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


ATTENTIONS: dict[str, Attention] = {"foo": foo_attention, "sdpa": sdpa_attention}


@dataclass(frozen=True)
class GPTConfig:
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 256


class GPT(nn.Module):
    """Pre-norm transformer with rotary positions and an output layer tied to the embedding."""

    rotation: Tensor

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        rotation = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)
        self.apply(initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, S) int64 to the logits of each next byte (B, S, VOCABULARY)."""
        hidden = self.embedding(tokens)
        cosine, sine = self.rotation[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        return F.linear(self.norm(hidden), self.embedding.weight)

    def save(self, path: Path) -> None:
        """Write a checkpoint of tensors and plain numbers, which loads with ``weights_only``."""
        torch.save({"config": asdict(self.config), "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: Path, attention: Attention) -> GPT:
        """Read a checkpoint onto the CPU, wherever its tensors were saved."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(GPTConfig(**checkpoint["config"]), attention)
        model.load_state_dict(checkpoint["weights"])
        return model


class Block(nn.Module):
    """Attention and a GELU MLP, each behind a norm and beside a residual connection."""

    def __init__(self, config: GPTConfig, attention: Attention) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention = attention
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_input = nn.Linear(width, 4 * width, bias=False)
        self.mlp_output = nn.Linear(4 * width, width, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map hidden (B, S, W) to (B, S, W)."""
        hidden = hidden + self.attend(self.attention_norm(hidden), cosine, sine)
        return hidden + self.mlp_output(F.gelu(self.mlp_input(self.mlp_norm(hidden))))

    def attend(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query_key_value = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))
        # Query and key turn together, (B, S, 2, H, D): half as many calls as one after the other.
        query, key = rotate(query_key_value[:, :, :2], cosine, sine).transpose(1, 3).unbind(2)
        value = query_key_value[:, :, 2].transpose(1, 2)
        return self.attention_output(self.attention(query, key, value).transpose(1, 2).flatten(2))


def rotary_table(context: int, head_dimension: int) -> Tensor:
    """Return the cosines and sines of rotary positions, (2, context, 1, 1, D / 2)."""
    pairs = head_dimension // 2
    frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None, :]


def rotate(vectors: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the pairs (d, d + D / 2) of vectors (B, S, 2, H, D) by the angle of their position."""
    first, second = vectors.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def initialise(module: nn.Module) -> None:
    """Draw weights of variance 1 / fan-in."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))


def next_byte_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte, 0-d, for two (B, S) int64 tensors."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
