"""Arguments of attention that several test files make invalid, and the errors they expect."""

import math
import re

import pytest
import torch


def raises(error, message):
    """Expect exactly this message, without the note on where C++ raised it."""
    return pytest.raises(error, match=rf"\A{re.escape(message)}\Z")


OPTIONS = [
    *(
        ("dropout_p", value, f"must be at least 0 and less than 1, got {printed}")
        for value, printed in ((1.0, "1"), (1.5, "1.5"), (-0.1, "-0.1"), (math.nan, "nan"))
    ),
    *(
        (name, value, f"must be at least 0, or -1 for no bound, got {value}")
        for name in ("window_left", "window_right")
        for value in (-2, -(2**40))
    ),
    *(
        ("softcap", value, f"must be positive and finite, or 0 for none, got {value:g}")
        for value in (-1.0, -0.5, math.inf, -math.inf, math.nan)
    ),
]


other_device = pytest.mark.parametrize(
    ("own", "other"), [("cpu", "foo:0"), ("foo:0", "cpu"), ("foo:0", "foo:1")]
)


GRADIENTS = ("grad_output", "grad_logsumexp", "output", "logsumexp")


def packed(device, **replaced):
    """Make arguments of attention_varlen: two sequences, with 4 and 5 queries, and 7 and 5 keys.

    A tensor is given by its elements if these are integers, else by its shape.
    """
    arguments = {
        "query": (9, 4, 8),
        "key": (12, 4, 8),
        "value": (12, 4, 8),
        "cu_seqlens_q": [0, 4, 9],
        "cu_seqlens_k": [0, 7, 12],
        "max_seqlen_q": 5,
        "max_seqlen_k": 7,
    }
    return make(device, arguments | replaced)


def paged(device, **replaced):
    """Make arguments of attention_varlen with 7 blocks of 4 keys; each sequence has up to 3."""
    blocks = {
        "key": (7, 4, 4, 8),
        "value": (7, 4, 4, 8),
        "block_table": [[6, 0, -1], [3, 2, -1]],
    }
    return packed(device, **(blocks | replaced))


def make(device, arguments):
    def tensor(value):
        if isinstance(value, tuple):
            return torch.zeros(value, device=device)
        return torch.tensor(value, dtype=torch.int32, device=device)

    return {
        name: tensor(value) if isinstance(value, (tuple, list)) else value
        for name, value in arguments.items()
    }


def varlen(arguments):
    torch.ops.foo.attention_varlen(**arguments)
