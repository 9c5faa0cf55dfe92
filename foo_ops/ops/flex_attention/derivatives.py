"""Compute flex attention with torch's own operators, differentiable in any order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import library
from foo_ops.kernels.flex.program import COMPARISONS, FLOATS, FUNCTIONS, Node, Program
from foo_ops.library.operators import find
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.attention.varlen import as_packed, sequences_of

# --------------------------------------------------------------------------------------- evaluation

# Compute programs with PyTorch's own operators, for all scores at once: differentiable in any
# order, and under any transform.


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a program's nodes, and the program."""

    nodes: list[Tensor]
    program: Program

    @property
    def output(self) -> Tensor:
        """Return the result of the program's function."""
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
        batch: the indices of the batch, in a shape that broadcasts with the scores.
        head: the indices of the heads, likewise.
        query: the indices of the queries, likewise.
        key: the indices of the keys, likewise.
        captured: the tensors that the program loads from.
        numbers: the floating-point numbers of the program.
        integers: the integers of the program.
        grad: the gradient of the function's result, for a program of gradients.

    Raises:
        IndexError: if an index is outside of a captured tensor.
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


# -------------------------------------------------------------------------------------- derivatives

# Compute flex attention with torch's own operators, in O(Sq * Sk) memory. These composites are
# differentiated if kernels have no derivatives, or if torch.func transforms the call.


def composite(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    kv_num_blocks: Tensor | None = None,
    kv_indices: Tensor | None = None,
    full_kv_num_blocks: Tensor | None = None,
    full_kv_indices: Tensor | None = None,
    *,
    score_mod: str = "",
    mask_mod: str = "",
    backward: str = "",
    numbers: Any = (),
    integers: Any = (),
    scale: float | None = None,
    query_block: int = 128,
    key_block: int = 128,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute foo::flex_attention, with the same arguments.

    For programs, the indices of the batch begin with ``first_batch``.
    """
    compute = compute_type(query.dtype)
    group = query.shape[1] // max(1, key.shape[1])
    keys, values = (it.to(compute).repeat_interleave(group, dim=1) for it in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query.to(compute) @ keys.mT * factor
    batch, head, rows, columns = _places(scores)
    places = (batch + first_batch, head, rows, columns)
    given: dict[str, Any] = {"captured": captured, "numbers": numbers, "integers": integers}
    if score_mod:
        scores = evaluate(score_mod, scores, *places, **given).output.expand(scores.shape)
    sees = torch.ones((), dtype=torch.bool, device=query.device)
    if mask_mod:
        sees = evaluate(mask_mod, scores, *places, **given).output
    if kv_num_blocks is not None and kv_indices is not None:
        sizes = (query_block, key_block, *scores.shape[2:])
        sees = sees & _covered(kv_num_blocks, kv_indices, *sizes)
        if full_kv_num_blocks is not None and full_kv_indices is not None:
            sees = sees | _covered(full_kv_num_blocks, full_kv_indices, *sizes)
    scores = scores.masked_fill(~sees, -math.inf)
    # A query that sees nothing has no softmax: compute that of zeros, and mask the result.
    blind = (scores == -math.inf).all(-1, keepdim=True)
    logsumexp = torch.logsumexp(scores.masked_fill(blind, 0.0), -1, keepdim=True)
    weights = torch.exp(scores - logsumexp).masked_fill(blind, 0.0)
    output = (weights @ values).to(query.dtype)
    return output, logsumexp.masked_fill(blind, -math.inf).squeeze(-1)


def composite_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    captured: list[Tensor],
    *sequences: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute foo::flex_attention_varlen, with the same arguments, a sequence at a time."""
    lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
    outputs = [query.new_zeros((0, query.shape[1], value.shape[-1]))]
    sums = [query.new_zeros((query.shape[1], 0), dtype=compute_type(query.dtype))]
    for number, sequence in enumerate(sequences_of(query, key, value, *sequences, **lengths)):
        own_query, own_key, own_value, *_ = sequence.arguments
        output, logsumexp = composite(
            own_query, own_key, own_value, captured, first_batch=number, **options
        )
        outputs.append(as_packed(output))
        sums.append(logsumexp.squeeze(0))
    return torch.cat(outputs), torch.cat(sums, dim=-1)


def register_gradients(name: str, forward: Callable[..., Any]) -> None:
    """Register an operator's gradients, by ``<name>_backward``, and the gradients of these.

    Args:
        name: the operator's name.
        forward: computes the same with torch's own operators.
    """
    operator = find(f"{name}_backward")

    def setup_context(ctx: Any, inputs: Any, keyword_only_inputs: Any, output: Any) -> None:
        query, key, value, captured, *others = inputs
        ctx.save_for_backward(query, key, value, *output, *others, *captured)
        ctx.others, ctx.options = len(others), keyword_only_inputs

    def backward(ctx: Any, grad_output: Tensor, grad_logsumexp: Tensor) -> tuple[Any, ...]:
        query, key, value, output, logsumexp, *rest = ctx.saved_tensors
        others, captured = rest[: ctx.others], rest[ctx.others :]
        needed = ctx.needs_input_grad[3]
        *gradients, found = operator(
            grad_output, grad_logsumexp, query, key, value, captured, output, logsumexp, *others,
            captured_requires_grad=needed, **ctx.options,
        )  # fmt: skip
        of_captured = [grad if it else None for it, grad in zip(needed, found)]
        return (*gradients, of_captured, *(None,) * ctx.others)

    library.register_autograd(name, backward, setup_context=setup_context, composite=forward)
    library.register_autograd(operator, composite=_make_composite_backward(forward))


def _make_composite_backward(forward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Make the composite of a backward operator from that of its forward operator."""

    def composite_backward(
        grad_output: Tensor,
        grad_logsumexp: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        captured: list[Tensor],
        output: Tensor,
        logsumexp: Tensor,
        *others: Tensor | None,
        captured_requires_grad: list[bool],
        **options: Any,
    ) -> tuple[Any, ...]:
        needed = [it for it, is_needed in zip(captured, captured_requires_grad) if is_needed]

        def attend(query: Tensor, key: Tensor, value: Tensor, *given: Tensor) -> Any:
            rest = iter(given)
            flags = zip(captured, captured_requires_grad)
            tensors = [next(rest) if is_needed else it for it, is_needed in flags]
            return forward(query, key, value, tensors, *others, **options)

        gradients = _pull_back(attend, (query, key, value, *needed), (grad_output, grad_logsumexp))
        found, flags = iter(gradients[3:]), zip(captured, captured_requires_grad)
        of_captured = [next(found) if is_needed else it.new_empty(0) for it, is_needed in flags]
        return (*gradients[:3], of_captured)

    return composite_backward


def _pull_back(
    function: Callable[..., Any], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Return the gradients of a function's inputs, which can be differentiated themselves.

    torch.func.vjp would open a level of its own, inside the one that dispatches this call.
    """
    is_recorded = torch.is_grad_enabled()
    with torch.enable_grad():
        # Adding a zero that requires a gradient keeps tangents, which detach would lose.
        inputs = tuple(it + it.new_zeros((), requires_grad=True) for it in inputs)
        outputs = function(*inputs)
        return torch.autograd.grad(
            outputs, inputs, grads, create_graph=is_recorded, materialize_grads=True
        )


def _places(scores: Tensor) -> list[Tensor]:
    """Return the indices of each score: batch, head, query and key."""
    places = []
    for axis in range(4):
        shape = [1, 1, 1, 1]
        shape[axis] = scores.shape[axis]
        numbers = torch.arange(scores.shape[axis], dtype=torch.int32, device=scores.device)
        places.append(numbers.view(shape))
    return places


def _covered(
    counts: Tensor, indices: Tensor, query_block: int, key_block: int, queries: int, keys: int
) -> Tensor:
    """Return the mask of the scores that a list's blocks cover, (B, H, Sq, Sk); B, H may be 1."""
    columns = -(-keys // key_block)
    is_block = torch.arange(indices.shape[3], device=indices.device) < counts.unsqueeze(-1)
    places = torch.where(is_block & (indices < columns), indices, columns).long()
    covered = torch.zeros(*counts.shape, columns + 1, dtype=torch.bool, device=counts.device)
    covered = covered.scatter(-1, places, True)[..., :columns]
    rows = covered.repeat_interleave(query_block, 2)[:, :, :queries]
    return rows.repeat_interleave(key_block, 3)[..., :keys]
