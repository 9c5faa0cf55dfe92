"""Compile flex attention with torch.compile, which has to see what its functions capture.

Dynamo turns the functions of torch's own flex_attention into graphs, and captured tensors into
inputs of the graphs. It handles our call in the same way. Wherever the call is run, it becomes the
ordinary operator, with programs made from the graphs: AOTAutograd records that operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from foo_ops.compat import (
    FlexAttentionHigherOrderVariable,
    HigherOrderOperator,
    variables_of_higher_order_operators,
)
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
    """Call an operator of flex attention under Dynamo.

    Args:
        name: ``"flex_attention"`` or ``"flex_attention_varlen"``.
        inputs: query, key and value.
        score_mod, mask_mod: the user's functions.
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
            score_mod: a graph, which takes captured tensors last.
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


class FlexAttentionVariable(FlexAttentionHigherOrderVariable):
    """Dynamo's variable for the operator.

    When Dynamo traces a function, it copies its record of attributes that were set, and continues
    with the copy. Objects that were made before still use the original: with torch's own operator,
    a cache's layer that is made in the compiled function loses attributes that are set later.
    """

    def create_wrapped_node(self, tx: Any, *arguments: Any) -> Any:
        """Trace a function, and write the copied record back to the original."""
        known = tx.output.side_effects
        result = super().create_wrapped_node(tx, *arguments)
        known.__dict__.update(tx.output.side_effects.__dict__)
        tx.output.side_effects = known
        return result


flex_attention_call = FlexAttentionCall()
variables_of_higher_order_operators[flex_attention_call.__name__] = FlexAttentionVariable
