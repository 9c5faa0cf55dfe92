"""Formulas for the gradients of custom operators."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils import _pytree as pytree


class Formula:
    """The two functions of torch.library.register_autograd, made from those of custom_ops."""

    def __init__(
        self,
        schema: Any,
        where: str,
        parts: dict[str, Callable[..., Any]],
        output_differentiability: list[bool] | None,
    ) -> None:
        """Make the two functions.

        Args:
            schema: the operator's parsed schema.
            where: the operator and the place of its backward function, for messages.
            parts: the functions ``save_for_backward`` and ``backward``.
            output_differentiability: for each output, whether it may have a gradient.
        """
        arguments = schema.arguments
        self._save = parts["save_for_backward"]
        self._gradients = parts["backward"]
        self._differentiability = output_differentiability
        self._where = f"In the backward function defined for {where} using the CustomOp API, "
        self._positional = [argument.name for argument in arguments.flat_positional]
        self._expected = {
            argument.name for argument in arguments.flat_all if argument.type.is_tensor_like()
        }
        names = [argument.name for argument in arguments.flat_all]
        self._arguments = collections.namedtuple(  # type: ignore[misc]
            f"{schema.name}_args", names
        )

    def setup_context(
        self,
        ctx: Any,
        inputs: tuple[Any, ...],
        output: Any,
        keyword_only_inputs: dict[str, Any] | None = None,
    ) -> None:
        arguments = self._arguments(*inputs, **(keyword_only_inputs or {}))
        leaves, ctx.structure = pytree.tree_flatten(self._save(arguments, output))
        # Tensors that are not saved by this function would keep a graph alive.
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
        ctx.are_tensors = [isinstance(leaf, Tensor) for leaf in leaves]
        ctx.others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        ctx.types = pytree.tree_map(type, arguments)
        self._mark_outputs(ctx, output)

    def _mark_outputs(self, ctx: Any, output: Any) -> None:
        if self._differentiability is None:
            return
        outputs = output if isinstance(output, tuple) else (output,)
        unmarked: list[Tensor] = []
        for position, (value, flag) in enumerate(zip(outputs, self._differentiability)):
            if isinstance(value, (Tensor, list)):
                unmarked += [] if flag else pytree.tree_leaves(value)
            elif flag:
                raise RuntimeError(
                    f"With output_differentiability={self._differentiability}. At idx {position}, "
                    f"we received an object of type {type(value)} that is not a Tensor, so it "
                    "cannot have been marked as differentiable in output_differentiability."
                )
        ctx.mark_non_differentiable(*unmarked)

    def backward(self, ctx: Any, *grads: Any) -> tuple[Any, ...]:
        tensors, others = iter(ctx.saved_tensors), iter(ctx.others)
        leaves = [next(tensors if is_tensor else others) for is_tensor in ctx.are_tensors]
        saved = pytree.tree_unflatten(leaves, ctx.structure)
        # The first argument, ctx, is reserved and holds nothing.
        gradients = self._gradients(object(), saved, *grads)
        self._validate(gradients, ctx.types)
        return tuple(gradients.get(name) for name in self._positional)

    def _validate(self, gradients: Any, types: Any) -> None:
        if not isinstance(gradients, dict):
            self._refuse(
                "expected the output of the backward function to be a dict but got "
                f"{type(gradients)}"
            )
        if self._expected != gradients.keys():
            self._refuse(
                f"expected the returned grad_input dict to have keys {self._expected} but got "
                f"{gradients.keys()}. The backward function must return a gradient (can be None) "
                "for each arg to the CustomOp that may be a Tensor or Sequence[Tensor]. Args "
                "declared to be non-Tensor-like types should not appear in the grad_input dict"
            )
        for name, gradient in gradients.items():
            type_ = getattr(types, name)
            if isinstance(type_, list):
                self._validate_list(name, gradient, type_)
            else:
                self._validate_one(name, gradient, type_)

    def _validate_list(self, name: str, gradient: Any, types: list[type]) -> None:
        expected = f"for input '{name}' expected the grad_input dict to hold a list of"
        if not isinstance(gradient, (tuple, list)):
            self._refuse(f"{expected} gradients but got object of type {type(gradient)}.")
        if len(gradient) != len(types):
            self._refuse(f"{expected} {len(types)} gradients but got {len(gradient)}")
        for position, (one, type_) in enumerate(zip(gradient, types)):
            if one is None:
                continue
            if not isinstance(one, Tensor):
                self._refuse(
                    f"{expected} None or Tensor gradients but got object of {type(one)} at index "
                    f"{position}"
                )
            if not issubclass(type_, Tensor):
                self._refuse(
                    f"for input '{name}', got a Tensor as the gradient for the {position}-th value "
                    f"but expected None because the {position}-th value was not a Tensor (it was "
                    f"type {types}"
                )

    def _validate_one(self, name: str, gradient: Any, type_: type) -> None:
        if gradient is None:
            return
        if not isinstance(gradient, Tensor):
            self._refuse(
                f"got object of type {type(gradient)} as the gradient for input '{name}', but "
                "expected the gradient to be either None or a Tensor"
            )
        if not issubclass(type_, Tensor):
            self._refuse(
                f"got a Tensor as the gradient for input '{name}' but expected None as the "
                f"gradient because input '{name}' was not a Tensor (it was type {type_})."
            )

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(self._where + what)
