"""Refuse arguments of ring attention, on all processes alike."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.distributed.ring import LENGTH, Ring, gather_objects
from foo_ops.library.operators import dtype_name
from foo_ops.ops.attention.options import AttentionOptions

NAMES = ("query", "key", "value", "alibi_slopes", "sinks")


def exchange_lengths(
    ring: Ring, tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> tuple[list[int], list[int]]:
    """Return how many queries and keys each process has.

    Where something is wrong on one process, all raise it.

    Args:
        tensors: those of NAMES and attn_bias.
    """
    error = error_of(tensors, options)
    all_ = gather_objects(described(tensors, options) if error is None else error, ring.group)
    for rank, its in enumerate(all_):
        if isinstance(its, Exception):
            raise type(its)(f"{its} (on rank {rank})")
    for rank, its in enumerate(all_):
        require_agreement(rank, its, all_[0])
    queries, keys = ([its["shapes"][name][LENGTH] for its in all_] for name in ("query", "key"))
    for rank, its in enumerate(all_):
        require_bias(rank, its, sum(keys))
    return queries, keys


def described(tensors: dict[str, Tensor | None], options: dict[str, Any]) -> dict[str, Any]:
    """Return what other processes are told of the arguments of this one."""
    bias, query = tensors["attn_bias"], tensors["query"]
    assert query is not None
    shapes = {name: None if it is None else list(it.shape) for name, it in tensors.items()}
    return {
        "shapes": shapes,
        "dtype": query.dtype,
        "bias dtype": None if bias is None else bias.dtype,
        "options": options,
    }


def error_of(
    tensors: dict[str, Tensor | None], options: dict[str, Any]
) -> ValueError | TypeError | None:
    """Return what is wrong with the arguments of this process."""
    query, key, value, slopes, sinks = (tensors[name] for name in NAMES)
    bias = tensors["attn_bias"]
    names = ("scale", "window_left", "window_right", "softcap")
    checked = AttentionOptions(**{name: options[name] for name in names}).checked()
    try:
        _C.check_attention(query, key, value, None, slopes, sinks, *checked)
    except (ValueError, TypeError) as error:
        return type(error)(f"ring_{error}")
    assert query is not None
    assert key is not None
    if bias is not None and bias.device != query.device:
        return ValueError(
            f"ring_attention: attn_bias must be on {query.device} as query is, got {bias.device}"
        )
    queries, keys = query.shape[LENGTH], key.shape[LENGTH]
    if options["is_causal"] and queries != keys:
        return ValueError(
            f"ring_attention: key must have length {queries} as query has if is_causal, got {keys}"
        )
    if options["is_balanced"] and queries % 2 != 0:
        return ValueError(
            f"ring_attention: query must have an even length if is_balanced, got {queries}"
        )
    return None


def require_agreement(rank: int, its: dict[str, Any], first: dict[str, Any]) -> None:
    options, first_options = its["options"], first["options"]
    is_balanced = options["is_causal"] and options["is_balanced"]
    for name in NAMES:
        shape, first_shape = its["shapes"][name], first["shapes"][name]
        has_length = name in NAMES[:3]
        expected = first_shape
        if has_length and not is_balanced:
            expected = [*first_shape[:LENGTH], shape[LENGTH], *first_shape[LENGTH + 1 :]]
        if shape != expected:
            lengths = " but for its length" if has_length and not is_balanced else ""
            raise ValueError(
                f"ring_attention: {name} must have the same shape on all processes{lengths}, got "
                f"{first_shape} on rank 0 and {shape} on rank {rank}"
            )
    if its["dtype"] != first["dtype"]:
        raise TypeError(
            "ring_attention: query must have the same dtype on all processes, got "
            f"{dtype_name(first['dtype'])} on rank 0 and {dtype_name(its['dtype'])} on rank {rank}"
        )
    for name, value in options.items():
        if value != first_options[name]:
            raise ValueError(
                f"ring_attention: {name} must be the same on all processes, got "
                f"{first_options[name]} on rank 0 and {value} on rank {rank}"
            )


def require_bias(rank: int, its: dict[str, Any], keys: int) -> None:
    """Refuse a bias that does not broadcast to a process's queries and all keys."""
    shapes = its["shapes"]
    if shapes["attn_bias"] is None:
        return
    whole = {name: list(shapes[name]) for name in NAMES[:3]}
    for name in ("key", "value"):
        whole[name][LENGTH] = keys
    tensors = [torch.empty(it, dtype=its["dtype"], device="meta") for it in whole.values()]
    bias = torch.empty(shapes["attn_bias"], dtype=its["bias dtype"], device="meta")
    try:
        _C.check_attention(*tensors, bias, None, None, *AttentionOptions().checked())
    except (ValueError, TypeError) as error:
        raise type(error)(f"ring_{error} (on rank {rank})") from None
