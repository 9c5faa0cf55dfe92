"""Compile flex attention with torch.compile, which has to see what its functions capture.

Dynamo turns the functions of torch's own flex_attention into graphs, and what they capture into
inputs of those. A call of ours is known to it in the same way, and becomes the ordinary operator
with programs made of the graphs wherever the call is run: so it is what AOTAutograd records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.variables import higher_order_ops as dynamo
from torch._ops import HigherOrderOperator
from torch.nn.attention.flex_attention import noop_mask

from foo_ops.ops.flex_attention.trace import trace


def compiled(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor],
    score_mod: Callable[..., Tensor] | None,
    mask_mod: Callable[..., Tensor] | None,
    others: tuple[Tensor | None, ...],
    scale: float | None,
    options: dict[str, int],
) -> tuple[Tensor, Tensor]:
    """Call the operator of a name where Dynamo looks on.

    Args:
        name: ``"flex_attention"`` or ``"flex_attention_varlen"``.
        inputs: query, key and value.
        score_mod, mask_mod: the functions of a user.
        others: the operator's other tensors.
        scale: factor of the products of query and key.
        options: the operator's other options.
    """
    mask = (name, *others, mask_mod or noop_mask)
    return flex_attention_call(*inputs, score_mod or _unchanged, mask, scale, options)


def _unchanged(score: Tensor, *places: Tensor) -> Tensor:
    return score


def _scaled(score_mod: Callable[..., Tensor], scale: torch.SymFloat) -> Callable[..., Tensor]:
    return lambda score, *others: score_mod(score * scale, *others)


class FlexAttentionCall(HigherOrderOperator):
    """Calls an operator of flex attention with graphs of functions."""

    def __init__(self) -> None:
        """Name the operator to Dynamo."""
        super().__init__("foo_flex_attention", cacheable=False)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable[..., Tensor],
        mask: tuple[Any, ...],
        scale: float | None,
        options: dict[str, int],
        captured_by_score_mod: tuple[Tensor, ...] = (),
        captured_by_mask_mod: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Compute the output and its logsumexp.

        Dynamo expects these arguments, which are those of torch's own operator.

        Args:
            query, key, value, scale: as in `foo_ops.flex_attention`.
            score_mod: a graph, which takes what it captures in the end.
            mask: the operator's name, its other tensors, and the graph of the mask_mod.
            options: the operator's other options.
            captured_by_score_mod, captured_by_mask_mod: given by Dynamo.
        """
        name, *others, mask_mod = mask
        if isinstance(scale, torch.SymFloat):
            # A number that varies is captured; in a schema it would be a constant.
            score_mod, scale = _scaled(score_mod, scale), 1.0
        programs = trace(
            lambda *numbers: score_mod(*numbers, *captured_by_score_mod),
            lambda *numbers: mask_mod(*numbers, *captured_by_mask_mod),
            query,
        )
        output, logsumexp = getattr(torch.ops.foo, name).default(
            query, key, value, programs.captured, *others,
            score_mod=programs.score_mod, mask_mod=programs.mask_mod, backward=programs.backward,
            numbers=programs.numbers, integers=programs.integers, scale=scale, **options,
        )  # fmt: skip
        return output, logsumexp


class FlexAttentionVariable(dynamo.FlexAttentionHigherOrderVariable):
    """What Dynamo has in the place of the operator.

    Tracing a function, it takes a copy of what it knows of attributes that were set, and goes on
    with the copy. Objects that were made before look into the one from before: with torch's own
    operator, a layer of a cache that is made in the compiled function loses what is set later.
    """

    def create_wrapped_node(self, tx: Any, *arguments: Any) -> Any:
        """Trace a function, and bring what is known back to where it was."""
        known = tx.output.side_effects
        result = super().create_wrapped_node(tx, *arguments)
        known.__dict__.update(tx.output.side_effects.__dict__)
        tx.output.side_effects = known
        return result


flex_attention_call = FlexAttentionCall()
dynamo._hop_name_to_variable_class[flex_attention_call.__name__] = FlexAttentionVariable
