"""Compute programs with PyTorch's own operators, for all scores at once: differentiable in any
order, and under any transform.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from foo_ops.kernels.flex.program import COMPARISONS, FLOATS, FUNCTIONS, Node, Program


@dataclasses.dataclass(frozen=True)
class Values:
    """What the nodes of a program are, and the arguments that they were computed from."""

    nodes: list[Tensor]
    program: Program

    @property
    def output(self) -> Tensor:
        """Return what the program's function returns."""
        return self.nodes[self.program.output]

    def gradients(self, captured: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of captured tensors, summed over all scores."""
        sums = [torch.zeros_like(it) for it in captured]
        for it in self.program.gradients:
            shapes = [self.nodes[node] for node in (it.value, *it.indices)]
            value, *indices = torch.broadcast_tensors(*shapes, self.output)[: len(shapes)]
            total = sums[it.captured]
            value = value.to(total.dtype)
            sums[it.captured] = (
                total.index_put(tuple(indices), value, accumulate=True)
                if indices
                else total + value.sum()
            )
        return sums


def evaluate(
    program: Program | str,
    score: Tensor,
    batch: Tensor,
    head: Tensor,
    query: Tensor,
    key: Tensor,
    captured: Sequence[Tensor] = (),
    numbers: Sequence[float] = (),
    integers: Sequence[int] = (),
    grad: Tensor | None = None,
) -> Values:
    """Compute a program for all scores at once.

    Args:
        program: the program, or its text.
        score: the scores (B, H, S, T).
        batch: the numbers of the batches, of a shape that broadcasts with the scores.
        head: those of the heads.
        query: those of the queries.
        key: those of the keys.
        captured: the tensors that the program loads from.
        numbers: the floating-point numbers of the program.
        integers: the integers of the program.
        grad: the gradient of the function's result, for a program of gradients.

    Raises:
        IndexError: an index is outside of a captured tensor.
    """
    program = Program.parse(program) if isinstance(program, str) else program
    inputs = {"score": score, "batch": batch, "head": head, "query": query, "key": key}
    if grad is not None:
        inputs["grad"] = grad
    nodes: list[Tensor] = []
    for node in program.nodes:
        dtype: torch.dtype = getattr(torch, node.dtype)
        arguments = [nodes[it] for it in node.arguments]
        if node.operation == "input":
            value = inputs[node.name].to(dtype)
        elif node.operation in ("number", "integer"):
            literals = numbers if node.operation == "number" else integers
            value = torch.tensor(literals[node.operands[0]], dtype=dtype, device=score.device)
        elif node.operation == "load":
            value = captured[node.operands[0]][tuple(arguments)]
        else:
            value = _computed(node, dtype, arguments)
        nodes.append(value)
    return Values(nodes, program)


def _computed(node: Node, dtype: torch.dtype, arguments: list[Tensor]) -> Tensor:
    if node.operation == "cast":
        return arguments[0].to(dtype)
    function = _FUNCTIONS[node.operation]
    if node.operation in _DIVISIONS and node.dtype not in FLOATS:
        x, y = arguments
        is_zero = y == 0
        return torch.where(is_zero, 0, function(x, torch.where(is_zero, 1, y)))
    return function(*arguments)


_DIVISIONS: dict[str, Callable[..., Tensor]] = {
    "floor_divide": torch.floor_divide,
    "trunc_divide": functools.partial(torch.div, rounding_mode="trunc"),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in (*FUNCTIONS, *COMPARISONS)},
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "pow")},
    **{name: getattr(torch, name) for name in ("minimum", "maximum", "neg", "abs", "sign")},
    **{name: getattr(torch, f"bitwise_{name}") for name in ("and", "or", "xor", "not")},
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    "where": torch.where,
    **_DIVISIONS,
}
