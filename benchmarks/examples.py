"""Compares the operators of examples/operators with PyTorch's own, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.measure import OURS, Case, Contenders, Local
from benchmarks.operators import Function, backward, compiled, forward
from examples.operators.adamw import adamw_
from examples.operators.causal_conv1d import causal_conv1d
from examples.operators.causal_conv1d import composite as torch_conv1d
from examples.operators.dropout import dropout
from examples.operators.embedding_bag import embedding_bag
from examples.operators.gelu import gelu
from examples.operators.grid_sample import grid_sample
from examples.operators.grouped_linear import grouped_linear
from examples.operators.histogram import histogram
from examples.operators.int8_linear import composite as torch_int8_linear
from examples.operators.int8_linear import int8_linear
from examples.operators.layer_norm import layer_norm
from examples.operators.nms import nms, overlaps
from examples.operators.quantize import quantize
from examples.operators.sample_top_p import composite as torch_sample_top_p
from examples.operators.sample_top_p import sample_top_p
from examples.operators.selective_scan import composite as torch_selective_scan
from examples.operators.selective_scan import selective_scan
from examples.operators.spectral_filter import composite as torch_spectral_filter
from examples.operators.spectral_filter import spectral_filter
from examples.operators.stencil import composite as torch_stencil
from examples.operators.stencil import stencil
from examples.operators.top_k import top_k

SECTION = "examples"
FLOAT32 = ("float32",)
DTYPES = (*FLOAT32, "bfloat16")


class MakeInputs(Protocol):
    def __call__(self, rows: int, dtype: torch.dtype) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Example:
    """An operator, PyTorch's counterpart, and their inputs.

    Attributes:
        ours, theirs: map the inputs to a tensor or several.
        inputs: makes the inputs, given the number of rows.
        differentiable: how many of the first inputs need a gradient; without any, there is no row
            for gradients.
        dtypes: dtypes of the inputs.
        compared: maps a result to the values in which contenders must agree.
    """

    ours: Function
    theirs: Function
    inputs: MakeInputs
    differentiable: int = 0
    dtypes: Sequence[str] = DTYPES
    compared: Callable[[Tensor], Tensor] = torch.clone


def normal(*shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]


# ------------------------------------------------------------------------------------ the operators


def rows_of(width: int, count: int = 1) -> MakeInputs:
    """Make tensors of (rows, width)."""
    return lambda rows, dtype: normal(*[(rows, width)] * count, dtype=dtype)


def rows_and_weights(rows: int, dtype: torch.dtype) -> list[Tensor]:
    return normal((rows, 1024), (1024,), (1024,), dtype=dtype)


def channels_and_taps(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make (2, 512, rows), with four taps and a bias per channel, as in Mamba."""
    return normal((2, 512, rows), (512, 4), (512,), dtype=dtype)


def rows_without_equals(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make rows of 4096 numbers that also differ in bfloat16: of equal ones PyTorch returns any."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.arange(0x3000, 0x4000, dtype=torch.int16).view(torch.bfloat16)
    order = torch.rand(rows, len(numbers), generator=generator).argsort(-1)
    return [numbers.to(dtype)[order]]


def torch_quantize(input: Tensor) -> tuple[Tensor, Tensor]:
    scale = input.abs().amax(-1).float() / 127
    return (input / scale[..., None]).round().to(torch.int8), scale


def torch_histogram(input: Tensor) -> Tensor:
    return torch.histc(input.float(), 100, -3.0, 3.0)


def table_and_bags(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make a table of 10000 rows, and bags of 20 rows each."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(10_000, (20 * rows,), generator=generator)
    return [*normal((10_000, 128), dtype=dtype), indices, torch.arange(0, 20 * rows, 20)]


def torch_embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
    return F.embedding_bag(indices, weight, offsets, mode="sum")


def boxes_and_scores(rows: int, dtype: torch.dtype) -> list[Tensor]:
    corners, sides, scores = normal((rows, 2), (rows, 2), (rows,), dtype=torch.float32)
    corners = 10 * corners
    return [torch.cat((corners, corners + sides.abs()), 1).to(dtype), scores]


def torch_nms(boxes: Tensor, scores: Tensor) -> Tensor:
    """Compare all pairs, then visit the boxes in the order of their scores."""
    order = scores.argsort(descending=True, stable=True)
    is_hidden = overlaps(boxes[order].float()).triu(1) > 0.5
    kept = torch.ones(len(order), dtype=torch.bool)
    for index in range(len(order)):
        kept &= ~(kept[index] & is_hidden[index])
    return order[kept]


def optimizer_state(rows: int, dtype: torch.dtype) -> list[Tensor]:
    parameter, average, square, grad = normal(*[(rows, 1024)] * 4, dtype=dtype)
    return [parameter, average, square.square(), grad]


def our_adamw(parameter: Tensor, average: Tensor, square: Tensor, grad: Tensor) -> Tensor:
    adamw_(parameter, average, square, grad, step=10)
    return parameter


def torch_adamw(parameter: Tensor, average: Tensor, square: Tensor, grad: Tensor) -> Tensor:
    """Call the kernel of torch.optim.AdamW(fused=True)."""
    torch._fused_adamw_(
        [parameter], [grad], [average], [square], [], [torch.tensor(10.0)],
        lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=1e-2, eps=1e-8,
        amsgrad=False, maximize=False,
    )  # fmt: skip
    return parameter


def spectra(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make spectra in complex64, whatever the dtype."""
    real = normal((rows, 1024), (rows, 1024), (1024,), (1024,), (1024,), dtype=torch.float32)
    return [torch.complex(*real[:2]), torch.complex(*real[2:4]), real[4]]


def as_real(function: Function) -> Function:
    """View complex results as float32, so that they can be compared."""
    return lambda *inputs: torch.view_as_real(function(*inputs))


def quantized_layer(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make a few rows, as in decoding, and a weight (4096, 2048)."""
    input, scale = normal((max(rows // 1024, 1), 2048), (4096,), dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-128, 128, (4096, 2048), generator=generator, dtype=torch.int8)
    return [input, weight, scale / 128]


def short_sequence(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make 64 steps of 256 channels and 16 states, which PyTorch computes step by step."""
    steps = (1, min(rows, 64))
    u, delta, decay, *others = normal(
        (*steps, 256), (*steps, 256), (256, 16), (*steps, 16), (*steps, 16), (256,), dtype=dtype
    )
    return [u, delta.abs() / 4, -decay.abs(), *others]


def tokens(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make the logits of a few tokens over a vocabulary of 32000."""
    (logits,) = normal((max(rows // 64, 1), 32_000), dtype=dtype)
    return [4 * logits]


def experts(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make rows of 8 groups, one of which is much larger, and matrices (512, 1024)."""
    input, weight = normal((rows, 512), (8, 512, 1024), dtype=dtype)
    shares = torch.tensor([1, 4, 5, 6, 7, 8, 12, 16], dtype=torch.float64) / 16
    return [input, weight / 512**0.5, (shares * rows).to(torch.int32)]


def torch_grouped_linear(input: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the groups one after the other."""
    sizes = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
    return torch.cat([rows @ matrix for rows, matrix in zip(input.split(sizes), weight)])


def images_and_grid(rows: int, dtype: torch.dtype) -> list[Tensor]:
    """Make two images of 64 channels, and a point near each pixel."""
    side = min(rows, 64)
    input, moves = normal((2, 64, side, side), (2, side, side, 2), dtype=torch.float32)
    line = torch.linspace(-1, 1, side)
    grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1) + 0.1 * moves
    return [input.to(dtype), grid.to(dtype)]


def torch_grid_sample(input: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(input, grid, align_corners=False)


EXAMPLES = {
    "layer_norm": Example(
        layer_norm, lambda x, *given: F.layer_norm(x, x.shape[-1:], *given), rows_and_weights, 3
    ),
    "gelu": Example(gelu, F.gelu, rows_of(4096), 1),
    "gelu tanh": Example(
        partial(gelu, approximate="tanh"), partial(F.gelu, approximate="tanh"), rows_of(4096), 1
    ),
    "causal_conv1d": Example(causal_conv1d, torch_conv1d, channels_and_taps, 3),
    "top_k": Example(
        lambda x: top_k(x, 50)[0], lambda x: torch.topk(x, 50)[0], rows_without_equals, 1
    ),
    "quantize": Example(quantize, torch_quantize, rows_of(4096)),
    "histogram": Example(
        partial(histogram, bins=100, min=-3.0, max=3.0), torch_histogram, rows_of(1024)
    ),
    "embedding_bag": Example(embedding_bag, torch_embedding_bag, table_and_bags, 1),
    "nms": Example(partial(nms, iou_threshold=0.5), torch_nms, boxes_and_scores, dtypes=FLOAT32),
    "adamw": Example(our_adamw, torch_adamw, optimizer_state),
    "spectral_filter": Example(
        as_real(spectral_filter), as_real(torch_spectral_filter), spectra, 3, dtypes=FLOAT32
    ),
    "grouped_linear": Example(grouped_linear, torch_grouped_linear, experts, 2),
    # For bfloat16 PyTorch also computes the points' positions in bfloat16.
    "grid_sample": Example(grid_sample, torch_grid_sample, images_and_grid, 2, dtypes=FLOAT32),
    "int8_linear": Example(int8_linear, torch_int8_linear, quantized_layer),
    "selective_scan": Example(
        lambda *it: selective_scan(*it)[0],
        lambda *it: torch_selective_scan(*it)[0],
        short_sequence,
        6,
    ),
    # They draw different tokens; only their range is compared.
    "sample_top_p": Example(
        partial(sample_top_p, p=0.9),
        partial(torch_sample_top_p, p=0.9),
        tokens,
        dtypes=FLOAT32,
        compared=lambda drawn: (drawn >= 0).float(),
    ),
    "dropout": Example(
        partial(dropout, p=0.1),
        partial(F.dropout, p=0.1),
        rows_of(1024),
        1,
        compared=torch.linalg.vector_norm,
    ),
    "stencil": Example(
        partial(stencil, rate=0.2), partial(torch_stencil, rate=0.2), rows_of(2048), 1
    ),
}


# ----------------------------------------------------------------------------------------- the rows


def cases(rows: int, threads: int) -> Iterator[Case]:
    for name, example in EXAMPLES.items():
        for dtype in example.dtypes:
            for is_backward in (False, True)[: 1 + bool(example.differentiable)]:
                direction = " backward" if is_backward else ""
                yield Case(
                    SECTION,
                    f"{name}{direction}, {dtype}, {rows} rows",
                    partial(contenders, example, getattr(torch, dtype), rows, is_backward),
                    (threads,),
                    headline=dtype == "float32",
                )


def contenders(example: Example, dtype: torch.dtype, rows: int, is_backward: bool) -> Contenders:
    """Return ours, PyTorch's operators in eager mode, and the same compiled."""
    make = backward if is_backward else forward

    def contender(function: Function) -> Local:
        inputs = list(example.inputs(rows, dtype))
        for tensor in inputs[: example.differentiable]:
            tensor.requires_grad_(is_backward)
        made = make(function, inputs)
        made.compared = example.compared
        return made

    return {
        OURS: lambda: contender(example.ours),
        "torch": lambda: contender(example.theirs),
        "compiled": lambda: contender(compiled(example.theirs)),
    }
