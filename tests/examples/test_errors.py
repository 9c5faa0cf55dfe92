"""The operators of examples/operators refuse bad input in one sentence, eager and fake."""

import importlib
import re

import pytest
import torch
from torch import Tensor

f32 = torch.ones


def f64(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def i64(*shape):
    return torch.zeros(*shape, dtype=torch.int64)


def i8(*shape):
    return torch.ones(*shape, dtype=torch.int8)


def c64(*shape):
    return torch.ones(*shape, dtype=torch.complex64)


SCAN = (f32(1, 5, 3), f32(1, 5, 3), f32(3, 2), f32(1, 5, 2), f32(1, 5, 2))
BINS = {"bins": 3, "min": 0.0, "max": 1.0}
WRONG_VALUES = [
    ("adamw", (f32(2), f32(2), f32(3), f32(2), {"step": 1}),
     "adamw_: exp_avg_sq must have shape [2] as parameter has, got [3]"),
    ("adamw", (f32(2), f32(2), f32(2), f32(2), {"step": 0}),
     "adamw_: step must be at least 1, got 0"),
    ("causal_conv1d", (f32(2, 3), f32(3, 4)),
     "causal_conv1d: input must have 3 dimensions, got 2"),
    ("causal_conv1d", (f32(1, 2, 3), f32(3, 4)),
     "causal_conv1d: weight must have shape [2, W], W > 0, as input has channels, got [3, 4]"),
    ("causal_conv1d", (f32(1, 2, 3), f32(2, 4), f32(3)),
     "causal_conv1d: bias must have shape [2] as input has channels, got [3]"),
    ("embedding_bag", (f32(3), i64(2), i64(1)),
     "embedding_bag: weight must have 2 dimensions, got 1"),
    ("embedding_bag", (f32(3, 2), i64(2, 1), i64(1)),
     "embedding_bag: indices must have 1 dimension, got 2"),
    ("embedding_bag", (f32(3, 2), i64(2), i64(1), f32(2), {"mean": True}),
     "embedding_bag: per_sample_weights must be None for means"),
    ("embedding_bag", (f32(3, 2), i64(2), i64(1), f32(3)),
     "embedding_bag: per_sample_weights must have shape [2] as indices have, got [3]"),
    ("gelu", (f32(3), {"approximate": "erf"}),
     "gelu: approximate must be one of none, tanh, got 'erf'"),
    ("grid_sample", (f32(2, 3, 4), f32(2, 5, 5, 2)),
     "grid_sample: input must have 4 dimensions, got 3"),
    ("grid_sample", (f32(2, 3, 4, 4), f32(1, 5, 5, 2)),
     "grid_sample: grid must have points of shape [2, P, 2] to match the batch of input, got [1, "
     "25, 2]"),
    ("grouped_linear", (f32(3), f32(2, 3, 4), i64(2)),
     "grouped_linear: input must have 2 dimensions, got 1"),
    ("grouped_linear", (f32(5, 3), f32(3, 4), i64(2)),
     "grouped_linear: weight must have 3 dimensions, got 2"),
    ("grouped_linear", (f32(5, 3), f32(2, 4, 3), i64(2)),
     "grouped_linear: weight must have shape [G, 3, N] as input has columns, got [2, 4, 3]"),
    ("grouped_linear", (f32(5, 3), f32(2, 3, 4), i64(3)),
     "grouped_linear: offsets must have shape [2], one for each group, got [3]"),
    ("histogram", (f32(3), BINS | {"bins": 0}), "histogram: bins must be at least 1, got 0"),
    ("histogram", (f32(3), BINS | {"max": 0.0}),
     "histogram: max must be more than min, 0.0, got 0.0"),
    ("int8_linear", (f32(()), i8(3, 4), f32(3)),
     "int8_linear: input must have at least 1 dimension, got 0"),
    ("int8_linear", (f32(5), i8(3, 4), f32(3)),
     "int8_linear: weight must have shape [N, 5] as input's rows have elements, got [3, 4]"),
    ("int8_linear", (f32(4), i8(3, 4), f32(3), f32(2)),
     "int8_linear: bias must have shape [3] to match the rows of weight, got [2]"),
    ("layer_norm", (f32(()),), "layer_norm: input must have at least 1 dimension, got 0"),
    ("layer_norm", (f32(2, 3), f32(3), f32(2)),
     "layer_norm: bias must have shape [3] as input's rows have, got [2]"),
    ("nms", (f32(3, 5), f32(3), {"iou_threshold": 0.5}),
     "nms: boxes must have shape [N, 4], got [3, 5]"),
    ("nms", (f32(3, 4), f32(2), {"iou_threshold": 0.5}),
     "nms: scores must have shape [3], one for each box, got [2]"),
    ("nms", (f32(3, 4), f32(3), {"iou_threshold": 1.5}),
     "nms: iou_threshold must be in [0, 1], got 1.5"),
    ("quantize", (f32(()),), "quantize: input must have at least 1 dimension, got 0"),
    ("sample_top_p", (f32(()),), "sample_top_p: logits must have at least 1 dimension, got 0"),
    ("sample_top_p", (f32(3), {"p": 0.0}), "sample_top_p: p must be in (0, 1], got 0.0"),
    ("sample_top_p", (f32(3), {"temperature": 0.0}),
     "sample_top_p: temperature must be positive, got 0.0"),
    ("selective_scan", (f32(5, 3), *SCAN[1:]), "selective_scan: u must have 3 dimensions, got 2"),
    ("selective_scan", (*SCAN[:3], f32(1, 4, 2), SCAN[4]),
     "selective_scan: B must have shape [1, 5, 2] as u and A have, got [1, 4, 2]"),
    ("spectral_filter", (c64(()),),
     "spectral_filter: input must have at least 1 dimension, got 0"),
    ("spectral_filter", (c64(3), None, f32(2)),
     "spectral_filter: gain must have shape [3] as input's rows have, got [2]"),
    ("stencil", (f32(3), {"rate": 0.1}), "stencil: input must have at least 2 dimensions, got 1"),
    ("top_k", (f32(()), 0), "top_k: input must have at least 1 dimension, got 0"),
    ("top_k", (f32(3), 4), "top_k: k must be in [0, 3], the elements of a row, got 4"),
]  # fmt: skip
WRONG_DTYPES = [
    ("causal_conv1d", (i64(1, 2, 3), f32(2, 4)),
     "causal_conv1d: input must be floating-point, got torch.int64"),
    ("causal_conv1d", (f32(1, 2, 3), f64(2, 4)),
     "causal_conv1d: weight must be torch.float32 as input is, got torch.float64"),
    ("dropout", (i64(3),), "dropout: input must be floating-point, got torch.int64"),
    ("embedding_bag", (i64(3, 2), i64(2), i64(1)),
     "embedding_bag: weight must be floating-point, got torch.int64"),
    ("embedding_bag", (f32(3, 2), f32(2), i64(1)),
     "embedding_bag: indices must be torch.int64, got torch.float32"),
    ("embedding_bag", (f32(3, 2), i64(2), i64(1), f64(2)),
     "embedding_bag: per_sample_weights must be torch.float32 as weight is, got torch.float64"),
    ("grid_sample", (i64(2, 3, 4, 4), f32(2, 5, 5, 2)),
     "grid_sample: input must be floating-point, got torch.int64"),
    ("grid_sample", (f32(2, 3, 4, 4), f64(2, 5, 5, 2)),
     "grid_sample: grid must be torch.float32 as input is, got torch.float64"),
    ("grouped_linear", (i64(5, 3), f32(2, 3, 4), i64(2)),
     "grouped_linear: input must be floating-point, got torch.int64"),
    ("grouped_linear", (f32(5, 3), f64(2, 3, 4), i64(2)),
     "grouped_linear: weight must be torch.float32 as input is, got torch.float64"),
    ("grouped_linear", (f32(5, 3), f32(2, 3, 4), f32(2)),
     "grouped_linear: offsets must be torch.int32 or torch.int64, got torch.float32"),
    ("histogram", (i64(3), BINS), "histogram: input must be floating-point, got torch.int64"),
    ("int8_linear", (i64(4), i8(3, 4), f32(3)),
     "int8_linear: input must be floating-point, got torch.int64"),
    ("int8_linear", (f32(4), f32(3, 4), f32(3)),
     "int8_linear: weight must be torch.int8, got torch.float32"),
    ("int8_linear", (f32(4), i8(3, 4), i64(3)),
     "int8_linear: scale must be floating-point, got torch.int64"),
    ("layer_norm", (i64(2, 3),), "layer_norm: input must be floating-point, got torch.int64"),
    ("layer_norm", (f32(2, 3), i64(3)),
     "layer_norm: weight must be floating-point, got torch.int64"),
    ("nms", (f32(3, 4), i64(3), {"iou_threshold": 0.5}),
     "nms: scores must be floating-point, got torch.int64"),
    ("quantize", (i64(3),), "quantize: input must be floating-point, got torch.int64"),
    ("sample_top_p", (i64(3),), "sample_top_p: logits must be floating-point, got torch.int64"),
    ("selective_scan", (i64(1, 5, 3), *SCAN[1:]),
     "selective_scan: u must be floating-point, got torch.int64"),
    ("selective_scan", (*SCAN, f64(3)),
     "selective_scan: D must be torch.float32 as u is, got torch.float64"),
    ("spectral_filter", (f32(3),),
     "spectral_filter: input must be torch.complex64 or torch.complex128, got torch.float32"),
    ("spectral_filter", (c64(3), f32(3)),
     "spectral_filter: response must be torch.complex64 where input is torch.complex64, "
     "got torch.float32"),
    ("stencil", (i64(3, 3), {"rate": 0.1}),
     "stencil: input must be floating-point, got torch.int64"),
    ("top_k", (i64(3), 1), "top_k: input must be floating-point, got torch.int64"),
]  # fmt: skip
WRONG = [(*it, ValueError) for it in WRONG_VALUES] + [(*it, TypeError) for it in WRONG_DTYPES]
FUNCTIONS = {"adamw": "adamw_"}


def function_of(name):
    module = importlib.import_module(f"examples.operators.{name}")
    return getattr(module, FUNCTIONS.get(name, name))


def call(name, arguments, device):
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    inputs = arguments[:-1] if options else arguments
    moved = [it.to(device) if isinstance(it, Tensor) else it for it in inputs]
    return function_of(name)(*moved, **options)


@pytest.mark.parametrize("device", ["cpu", "foo", "meta"])
@pytest.mark.parametrize(
    ("name", "arguments", "message", "error"), WRONG, ids=lambda it: str(it)[:50]
)
def test_wrong_input(name, arguments, message, error, device):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(name, arguments, device)


WRONG_CONTENTS = [
    ("embedding_bag", (f32(3, 2), i64(2) + 3, i64(1)), IndexError,
     "embedding_bag: indices must be in [0, 3), the rows of weight, got 3"),
    ("embedding_bag", (f32(3, 0), i64(2) + 3, i64(1)), IndexError,
     "embedding_bag: indices must be in [0, 3), the rows of weight, got 3"),
    ("embedding_bag", (f32(3, 2), i64(2), i64(2) + 1), ValueError,
     "embedding_bag: offsets must begin with 0, not decrease and be at most 2, the number "
     "of indices, got [1, 1]"),
    ("embedding_bag", (f32(3, 2), i64(2), torch.tensor([0, 2, 1])), ValueError,
     "embedding_bag: offsets must begin with 0, not decrease and be at most 2, the number "
     "of indices, got [0, 2, 1]"),
    ("embedding_bag", (f32(3, 2), i64(2), i64(0)), ValueError,
     "embedding_bag: offsets must begin with 0, not decrease and be at most 2, the number "
     "of indices, got []"),
    ("grouped_linear", (f32(5, 3), f32(2, 3, 4), torch.tensor([3, 2])), ValueError,
     "grouped_linear: offsets must not decrease and be in [0, 5], the rows of input, got [3, 2]"),
    ("grouped_linear", (f32(0, 3), f32(1, 3, 4), torch.tensor([1])), ValueError,
     "grouped_linear: offsets must not decrease and be in [0, 0], the rows of input, got [1]"),
    ("grouped_linear", (f32(5, 3), f32(1, 3, 4), torch.tensor([-1])), ValueError,
     "grouped_linear: offsets must not decrease and be in [0, 5], the rows of input, got [-1]"),
]  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG_CONTENTS)
def test_wrong_contents(name, arguments, error, message, device):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call(name, arguments, device)


def test_wrong_indices_of_a_gradient():
    function_of("top_k")
    message = "top_k_backward: indices must be in [0, 3), the columns of input, got -1"
    with pytest.raises(IndexError, match=re.escape(message)):
        torch.ops.examples.top_k_backward(f32(1), f32(3), i64(1) - 1)


@pytest.mark.parametrize(
    ("seed", "p", "message"),
    [(i64(2), 0.5, "dropout: seed must have shape [1], got [2]"),
     (i64(1), 1.5, "dropout: p must be in [0, 1], got 1.5")],
)  # fmt: skip
def test_wrong_options_of_dropout(seed, p, message):
    function_of("dropout")
    with pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.examples.dropout(f32(3), seed, p=p)


@pytest.mark.parametrize(
    ("grad_output", "mask", "error", "message"),
    [(i64(3), i64(3) > 0, TypeError,
      "dropout: grad_output must be floating-point, got torch.int64"),
     (f32(3), i64(3), TypeError, "dropout: mask must be torch.bool, got torch.int64"),
     (f32(3), i64(2) > 0, ValueError,
      "dropout: mask must have shape [3] as grad_output has, got [2]")],
)  # fmt: skip
def test_wrong_mask_of_dropout(grad_output, mask, error, message):
    function_of("dropout")
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        torch.ops.examples.dropout_backward(grad_output, mask, p=0.5)


def test_histogram_of_a_matrix():
    """The public function flattens the matrix."""
    assert function_of("histogram")(f32(2, 3), **BINS).tolist() == [0, 0, 6]
    with pytest.raises(ValueError, match="histogram: input must have 1 dimension, got 2"):
        torch.ops.examples.histogram(f32(2, 3), **BINS)
