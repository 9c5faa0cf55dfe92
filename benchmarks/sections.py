"""The tables of the benchmark."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A table; its ``unit`` is a time (us, ms) or a rate (GB/s, GFLOP/s)."""

    title: str
    unit: str


SECTIONS = {
    "peaks": Section("What the machine can do at most, GFLOP/s", "GFLOP/s"),
    "bandwidth": Section("What the machine can read from memory, GB/s", "GB/s"),
    "calls": Section("A call with 8 floats, microseconds (less is better)", "us"),
    "abs": Section("Elementwise, GB/s of memory read and written (more is better)", "GB/s"),
    "operators": Section(
        "Operators beside attention, GB/s of memory read and written (more is better)", "GB/s"
    ),
    "linear": Section("Linear layers, rows x width x outputs, GFLOP/s (more is better)", "GFLOP/s"),
    "linear of few rows": Section(
        "Linear layers of few rows, GB/s of weights (more is better)", "GB/s"
    ),
    "quantized linear": Section(
        "Linear layers of 8 and 4 bits, GFLOP/s (more is better)", "GFLOP/s"
    ),
    "quantized linear of one row": Section(
        "Layers of 8 and 4 bits, one row, GB/s of our weights (more is better)", "GB/s"
    ),
    "experts": Section(
        "Experts of a mixture, tokens x choices, GFLOP/s (more is better)", "GFLOP/s"
    ),
    "experts of few tokens": Section(
        "Experts of few tokens, GB/s of the weights of their experts (more is better)", "GB/s"
    ),
    "linear_cross_entropy": Section(
        "The loss of a linear layer with its gradients, milliseconds (less is better)", "ms"
    ),
    "memory of linear_cross_entropy": Section(
        "The same: the most memory at a time beside inputs, megabytes (less is better)", "MB"
    ),
    "kit": Section("The kit's tutorial, GB/s of memory read and written (more is better)", "GB/s"),
    "examples": Section("The operators of examples/operators, microseconds (less is better)", "us"),
    "device": Section("Device foo beside the CPU, microseconds (less is better)", "us"),
    "sanitizer": Section(
        "Device foo under its sanitizer and without, microseconds (less is better)", "us"
    ),
    "attention forward": Section(
        "Attention forward, heads x head dimension, GFLOP/s of useful work (more is better)",
        "GFLOP/s",
    ),
    "attention backward": Section(
        "Attention backward, heads x head dimension, GFLOP/s of useful work (more is better)",
        "GFLOP/s",
    ),
    "attention options": Section(
        "Attention with options, heads x head dimension, GFLOP/s of useful work (more is better)",
        "GFLOP/s",
    ),
    "attention decoding": Section(
        "Attention of one query, heads x head dimension, GB/s of keys and values (more is better)",
        "GB/s",
    ),
    "flex attention": Section(
        "Flex attention, heads x head dimension, milliseconds (less is better)", "ms"
    ),
    "flex gallery": Section(
        "The manual's variants of flex attention, heads x head dimension, milliseconds", "ms"
    ),
    "models": Section(
        "Models as they are and with foo_ops, tokens a second (more is better)", "tokens/s"
    ),
    "adapters": Section(
        "A step of training adapters (LoRA) on quantised weights, milliseconds (less is better)",
        "ms",
    ),
    "memory of adapters": Section(
        "The same: weights of the layers that have adapters, megabytes (less is better)", "MB"
    ),
    "encoders": Section(
        "An embedding model on texts of different lengths, tokens a second (more is better)",
        "tokens/s",
    ),
    "loading": Section(
        "Checkpoints of 4 bits: loading, beside reading the file, milliseconds (less is better)",
        "ms",
    ),
    "memory of loading": Section(
        "The same: the most memory at a time, beside the size of the file, megabytes", "MB"
    ),
    "decode": Section(
        "Tokens one after the other, and the parts of a token, microseconds (less is better)", "us"
    ),
    "first call": Section("First call in a process, milliseconds (less is better)", "ms"),
}
# For measurements of memory, the seconds are megabytes.
SECONDS_IN_UNIT = {"us": 1e-6, "ms": 1e-3, "MB": 1.0}
