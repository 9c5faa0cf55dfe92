"""A transformer block made of foo_ops' operators."""

import torch
from torch import nn

import foo_ops

HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 8, 4, 4, 8
WIDTH, HIDDEN = HEADS * HEAD_DIM, 24


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, input):
        return foo_ops.rms_norm(input, self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.key = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.value = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.output = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)

    def forward(self, input):
        query, key, value = (
            layer(input).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = foo_ops.attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, input):
        return self.down(foo_ops.silu_mul(self.gate(input), self.up(input)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.attention = Norm(), Attention()
        self.feed_norm, self.feed = Norm(), SwiGLU()

    def forward(self, input):
        input = input + self.attention(self.attention_norm(input))
        return input + self.feed(self.feed_norm(input))


def make_block(device):
    torch.manual_seed(0)
    return Block().double().to(device)


def make_batch(device, size=4):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, LENGTH, WIDTH, dtype=torch.float64, generator=generator).to(device)


def loss_of(block, batch):
    return block(batch).square().mean()
