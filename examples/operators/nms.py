"""Non-maximum suppression: of overlapping boxes, the one with the best score is kept.

A box is kept unless its intersection over union with a better kept box exceeds a threshold (as in
torchvision.ops.nms).

Shows a result whose shape depends on the data: a Python function calls a kernel, and the fake
kernel requests an unknown size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foo_ops import language, library
from foo_ops.testing import OpSpec, Sample, random

TAGS = torch.Tag.pt2_compliant_tag
library.define(
    "examples::nms",
    "(Tensor boxes, Tensor scores, *, float iou_threshold) -> Tensor",
    tags=(TAGS, torch.Tag.dynamic_output_shape),
)
# Takes the boxes ordered by score, (4, N).
library.define("examples::nms_kept", "(Tensor boxes, *, float iou_threshold) -> Tensor", tags=TAGS)


def nms(boxes: Tensor, scores: Tensor, *, iou_threshold: float) -> Tensor:
    """Return the indices of kept boxes, int64, best score first.

    ``boxes`` (N, 4) are x1, y1, x2, y2 with x1 <= x2 and y1 <= y2; ``scores`` are (N,).
    """
    return torch.ops.examples.nms(boxes, scores, iou_threshold=iou_threshold)


# ----------------------------------------------------------------------------------------- kernel


@library.register_kernel("examples::nms_kept", ("cpu", "foo"))
@library.tile_kernel(tiles=lambda boxes: 1, contiguous_rows=True)
def kernel(boxes: Any, iou_threshold: Any, kept: Any, tiles: Any) -> None:
    left, top, right, bottom = boxes.row(0), boxes.row(1), boxes.row(2), boxes.row(3)
    nothing, threshold = language.zero(boxes), language.cast(iou_threshold, boxes)
    size = boxes.shape[1]
    for i in range(size):
        kept[i] = 1
    for i in range(size):
        if kept[i] == 0:
            continue
        x1, y1, x2, y2 = left[i], top[i], right[i], bottom[i]
        area = (x2 - x1) * (y2 - y1)
        for j in range(i + 1, size):
            width = min(x2, right[j]) - max(x1, left[j])
            height = min(y2, bottom[j]) - max(y1, top[j])
            intersection = max(width, nothing) * max(height, nothing)
            other = (right[j] - left[j]) * (bottom[j] - top[j])
            is_kept = intersection <= threshold * (area + other - intersection)
            kept[j] = kept[j] & is_kept


@library.register_kernel("examples::nms", ("cpu", "foo"))
def ordered(boxes: Tensor, scores: Tensor, *, iou_threshold: float) -> Tensor:
    check(boxes, scores, iou_threshold)
    order = scores.argsort(descending=True, stable=True)
    kept = torch.ops.examples.nms_kept(boxes[order].T.contiguous(), iou_threshold=iou_threshold)
    return order[kept]


# ------------------------------------------------------------------------------------------- fake


def check(boxes: Tensor, scores: Tensor, iou_threshold: float) -> None:
    for name, given in (("boxes", boxes), ("scores", scores)):
        if not given.is_floating_point():
            raise TypeError(f"nms: {name} must be floating-point, got {given.dtype}")
    if boxes.dim() != 2 or not library.holds(boxes.shape[1] == 4):
        raise ValueError(f"nms: boxes must have shape [N, 4], got {list(boxes.shape)}")
    if not library.have_sizes(scores.shape, boxes.shape[:1]):
        raise ValueError(
            f"nms: scores must have shape {list(boxes.shape[:1])}, one for each box, "
            f"got {list(scores.shape)}"
        )
    if not 0.0 <= iou_threshold <= 1.0:
        raise ValueError(f"nms: iou_threshold must be in [0, 1], got {iou_threshold}")


@library.register_fake("examples::nms")
def fake(boxes: Tensor, scores: Tensor, *, iou_threshold: float) -> Tensor:
    check(boxes, scores, iou_threshold)
    size = library.get_ctx().new_dynamic_size()
    return boxes.new_empty(size, dtype=torch.int64)


@library.register_fake("examples::nms_kept")
def fake_kept(boxes: Tensor, *, iou_threshold: float) -> Tensor:
    return boxes.new_empty(boxes.shape[1], dtype=torch.bool)


# ---------------------------------------------------------------------------------------- samples


def overlaps(boxes: Tensor) -> Tensor:
    """Return the intersection over union of all pairs."""
    lower = torch.maximum(boxes[:, None, :2], boxes[None, :, :2])
    upper = torch.minimum(boxes[:, None, 2:], boxes[None, :, 2:])
    intersection = (upper - lower).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(-1)
    return intersection / (areas[:, None] + areas - intersection)


def reference(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    is_hidden_by = overlaps(boxes) > iou_threshold
    kept: list[int] = []
    for index in scores.argsort(descending=True, stable=True).tolist():
        if not is_hidden_by[index, kept].any():
            kept.append(index)
    return torch.tensor(kept, dtype=torch.int64)


def sample(size: int, dtype: torch.dtype, iou_threshold: float = 0.3) -> Sample:
    corners, sides, scores = random("nms", (size, 2), (size, 2), (size,), dtype=torch.float64)
    corners, sides = (3 * corners).to(dtype), (sides.abs() + 1).to(dtype)
    boxes = torch.cat((corners, corners + sides), 1)
    return Sample((boxes, scores.to(dtype)), {"iou_threshold": iou_threshold})


def alike(dtype: torch.dtype) -> Sample:
    """Make boxes that are equal, empty, or adjacent, and equal scores."""
    corners = torch.tensor([[0, 0, 2, 2], [0, 0, 2, 2], [2, 0, 4, 2], [1, 1, 1, 1], [1, 1, 3, 3]])
    scores = torch.tensor([0.5, 0.5, 0.25, 0.5, 1.0], dtype=dtype)
    return Sample((corners.to(dtype), scores), {"iou_threshold": 0.125})


SPEC = OpSpec(
    operator=torch.ops.examples.nms.default,
    reference=reference,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    sized=lambda dtype, size: sample(5 * size, dtype),
    samples={
        "all that touch": lambda dtype: sample(33, dtype, iou_threshold=0.0),
        "alike": alike,
    },
    essential=("size7", "alike"),
    differentiable=False,
)
