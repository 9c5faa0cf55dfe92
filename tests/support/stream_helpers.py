"""Imports and helpers that programs on streams share."""

import torch

SIZE = 1000


def default():
    return torch.foo.current_stream()


def ones():
    return torch.ones(SIZE, device="foo")


def on(stream):
    return torch.foo.stream(stream)


def pinned():
    return torch.ones(SIZE).pin_memory()
