"""A GPT on bytes, similar to Llama, which takes its operators as an argument.

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

import foo_ops

VOCABULARY = 256
"""Every byte is a token."""
EPS = 1e-6
"""The eps of the norms."""


@dataclass(frozen=True)
class Operators:
    """The operators of a block, besides matrix products.

    Attributes:
        attention: causal, query, key and value (B, H, S, D) to output (B, H, S, D).
        alibi_attention: the same, with slopes (H,) by which scores fall with the distance.
        rms_norm: the RMS norm of rows, with a weight.
        add_rms_norm: the norm of a sum, and the sum.
        rotary_embedding: rotates the pairs (d, d + D / 2) of rows by angles.
        silu_mul: silu(gate) * up.
        cross_entropy: the mean loss of hidden (N, W), weights (V, W) of the last layer and targets
            (N).
    """

    attention: Callable[[Tensor, Tensor, Tensor], Tensor]
    alibi_attention: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    rotary_embedding: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor, Tensor], Tensor]
    cross_entropy: Callable[[Tensor, Tensor, Tensor], Tensor]


def foo_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    output, _logsumexp = torch.ops.foo.attention(query, key, value, is_causal=True)
    return output


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def causal(batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor) -> Tensor:
    return query_index >= key_index


def foo_alibi_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    def alibi(
        score: Tensor, batch: Tensor, head: Tensor, query_index: Tensor, key_index: Tensor
    ) -> Tensor:
        return score - slopes[head] * (query_index - key_index)

    output = foo_ops.flex_attention(query, key, value, alibi, causal)
    assert isinstance(output, Tensor)
    return output


def sdpa_alibi_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor) -> Tensor:
    """Use a bias for all pairs, since FlexAttention has no gradients on CPUs."""
    positions = torch.arange(query.shape[2], device=query.device)
    distance = positions[:, None] - positions
    bias = (-slopes[:, None, None] * distance).masked_fill(distance < 0, -math.inf)
    return F.scaled_dot_product_attention(query, key, value, bias)


def torch_rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, EPS)


def torch_add_rms_norm(input: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = input + residual
    return torch_rms_norm(total, weight), total


def torch_rotary_embedding(input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = input.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


def torch_silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def torch_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), target)


def foo_cross_entropy(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = foo_ops.linear_cross_entropy(hidden, weight, target)
    assert isinstance(loss, Tensor)
    return loss


OPERATORS = {
    "foo": Operators(
        foo_attention,
        foo_alibi_attention,
        foo_ops.rms_norm,
        foo_ops.add_rms_norm,
        foo_ops.rotary_embedding,
        foo_ops.silu_mul,
        foo_cross_entropy,
    ),
    "torch": Operators(
        sdpa_attention,
        sdpa_alibi_attention,
        torch_rms_norm,
        torch_add_rms_norm,
        torch_rotary_embedding,
        torch_silu_mul,
        torch_cross_entropy,
    ),
}


ATTENTION = ("causal", "flex")


@dataclass(frozen=True)
class GPTConfig:
    """Sizes, and the kind of attention.

    Attributes:
        attention: "causal", or "flex" for causal attention with ALiBi, whose slopes are learned.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    inner: int = 352
    context: int = 256
    attention: str = "causal"


class GPT(nn.Module):
    """Pre-norm transformer with rotary positions and an output layer tied to the embedding."""

    rotation: Tensor

    def __init__(self, config: GPTConfig, operators: Operators) -> None:
        super().__init__()
        self.config = config
        self.operators = operators
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, operators) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        rotation = rotary_table(config.context, config.width // config.heads)
        self.register_buffer("rotation", rotation, persistent=False)
        self.apply(initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, S) int64 to the logits of each next byte (B, S, VOCABULARY)."""
        return F.linear(self.hidden(tokens), self.embedding.weight)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Map tokens (B, S) int64 to the input of the output layer (B, S, W)."""
        hidden = self.embedding(tokens)
        cosine, sine = self.rotation[:, : tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, cosine, sine)
        normalised: Tensor = self.operators.rms_norm(hidden, self.norm)
        return normalised

    def save(self, path: Path) -> None:
        """Write a checkpoint of tensors and numbers, which loads with ``weights_only``."""
        torch.save({"config": asdict(self.config), "weights": self.state_dict()}, path)

    @classmethod
    def load(cls, path: Path, operators: Operators) -> GPT:
        """Read a checkpoint onto the CPU, wherever its tensors were saved."""
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        model = cls(GPTConfig(**checkpoint["config"]), operators)
        model.load_state_dict(checkpoint["weights"])
        return model


class Block(nn.Module):
    """Attention and a SwiGLU, each with a norm before it and a residual connection."""

    def __init__(self, config: GPTConfig, operators: Operators) -> None:
        super().__init__()
        width, inner = config.width, config.inner
        self.heads = config.heads
        self.operators = operators
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.mlp_input = nn.Linear(width, 2 * inner, bias=False)
        self.mlp_output = nn.Linear(inner, width, bias=False)
        # Initialised as in ALiBi, to powers of two.
        powers = torch.arange(1, config.heads + 1) * (8 / config.heads)
        self.slopes = nn.Parameter(2.0**-powers) if config.attention == "flex" else None

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map hidden (B, S, W) to (B, S, W)."""
        normalised = self.operators.rms_norm(hidden, self.attention_norm)
        attended = self.attend(normalised, cosine, sine)
        normalised, hidden = self.operators.add_rms_norm(attended, hidden, self.mlp_norm)
        gate, up = self.mlp_input(normalised).chunk(2, dim=-1)
        return hidden + self.mlp_output(self.operators.silu_mul(gate, up))

    def attend(self, hidden: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        query_key_value = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1))
        # Query and key are rotated together, (B, S, 2, H, D): half as many calls.
        turned = self.operators.rotary_embedding(query_key_value[:, :, :2], cosine, sine)
        query, key = turned.transpose(1, 3).unbind(2)
        value = query_key_value[:, :, 2].transpose(1, 2)
        if self.slopes is None:
            output = self.operators.attention(query, key, value)
        else:
            output = self.operators.alibi_attention(query, key, value, self.slopes)
        return self.attention_output(output.transpose(1, 2).flatten(2))


def rotary_table(context: int, head_dimension: int) -> Tensor:
    """Return the cosines and sines of rotary positions, (2, context, 1, 1, D / 2)."""
    pairs = head_dimension // 2
    frequencies = 10_000.0 ** (-torch.arange(pairs) / pairs)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack((angles.cos(), angles.sin()))[:, :, None, None, :]


def initialise(module: nn.Module) -> None:
    """Draw weights of variance 1 / fan-in."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.in_features))
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.embedding_dim))


def next_byte_loss(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte, 0-d, for two (B, S) int64 tensors."""
    hidden = model.hidden(inputs).flatten(0, 1)
    return model.operators.cross_entropy(hidden, model.embedding.weight, targets.flatten())
