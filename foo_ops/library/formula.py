"""Let a formula in Python compute the gradients of calls that are recorded in C++."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

_numbers = itertools.count()
# Contexts that hold nothing else need no formula of their own when a backward pass is compiled.
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))

# What a value holds: a list of so many tensors, one tensor, or none.
_Holds = int | None
_ONE = -1
_Flags = tuple[bool | list[bool], ...]


class Context:
    """Carries what a formula needs from its setup_context to its backward, as the ctx of a
    torch.autograd.Function does.

    Attributes that setup_context sets are there in backward. Those that backward sets are gone
    afterwards, since several threads may run the same backward pass.
    """

    saved_tensors: tuple[Tensor | None, ...] = ()
    _non_differentiable: tuple[Tensor, ...] = ()
    _materializes_gradients = True
    # Flags for each tensor one by one, or the inputs, whose flags they are.
    _needed: Sequence[bool] | None = None
    _inputs: tuple[Any, ...] = ()
    _held: tuple[_Holds, ...]

    @property
    def needs_input_grad(self) -> _Flags:
        """For each input whether its gradient is needed; a list where the input is one."""
        needed = self._needed
        if needed is None:
            tensors = _tensors(self._inputs, self._held)
            needed = [it is not None and it.requires_grad for it in tensors]
        return _arranged(needed, self._held, False)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep tensors, which are found in ``saved_tensors`` then; later changes are noticed."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Let results have no gradients."""
        self._non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose what stands for a gradient that is missing: zeros, which is the default, or
        None.
        """
        self._materializes_gradients = value


class Kept(NamedTuple):
    """What a call leaves for its backward pass, apart from the tensors that its node keeps."""

    attributes: dict[str, Any]
    inputs: tuple[_Holds, ...]
    results: tuple[_Holds, ...]


class _Kinds:
    """Says which values of a schema's arguments or returns are tensors, and which are lists."""

    def __init__(self, declared: Sequence[torch._C.Argument]) -> None:
        types = [str(it.type) for it in declared]
        self._are_lists = ["List[" in it and "Tensor" in it for it in types]
        # Where nothing is optional and no list, all calls hold the same.
        self._always: tuple[_Holds, ...] | None = None
        if not any("Tensor" in it and it != "Tensor" for it in types):
            self._always = tuple(_ONE if it == "Tensor" else None for it in types)

    def held(self, values: tuple[Any, ...]) -> tuple[_Holds, ...]:
        if self._always is not None:
            return self._always
        return tuple(
            [
                _ONE
                if isinstance(value, Tensor)
                else len(value)
                if is_list and value is not None
                else None
                for value, is_list in zip(values, self._are_lists)
            ]
        )


class _Gradients:
    """Says what the tensors among an operator's arguments and results are."""

    def __init__(self, operator: torch._ops.OpOverload) -> None:
        arguments, results = operator._schema.arguments, operator._schema.returns
        self._number = next(_numbers)
        self._keyword_only = tuple(it.name for it in arguments if it.kwarg_only)
        self._inputs = _Kinds([it for it in arguments if not it.kwarg_only])
        self._all = _Kinds(arguments)
        self._results = _Kinds(results)

    def key(self, kept: Kept) -> str:
        """Return the same for calls whose backward passes differ only in their tensors."""
        is_plain = all(isinstance(it, _CONSTANTS) for it in kept.attributes.values())
        return f"{self._number} {kept if is_plain else next(_numbers)}"


class Formula(_Gradients):
    """Gradients of an operator, from functions as torch.library.register_autograd takes them.

    It is called by csrc/python/python_formula.cpp.
    """

    def __init__(
        self,
        operator: torch._ops.OpOverload,
        backward: Callable[..., Any],
        setup_context: Callable[..., None] | None,
    ) -> None:
        """Make a formula.

        Args:
            operator: it must be functional, and its keyword-only arguments no tensors.
            backward: takes the context and gradients of the results.
            setup_context: as torch.library.register_autograd takes it.
        """
        super().__init__(operator)
        self._name = operator.name()
        self._backward = backward
        self._setup_context = setup_context
        self._names = tuple(it.name for it in operator._schema.arguments if not it.kwarg_only)
        self._gives_tensors = all(str(it.type) == "Tensor" for it in operator._schema.returns)

    def keep(
        self, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[Kept, tuple[Tensor | None, ...], tuple[Tensor, ...], bool]:
        """Return what a call leaves for its backward pass: what comes back to the formula, tensors
        to save, results without gradients, and whether zeros stand for missing gradients.
        """
        inputs = arguments[: len(self._names)] if self._keyword_only else arguments
        held = self._inputs.held(inputs)
        context = Context()
        # What is set on the context is what is kept: most calls are short, and so is this.
        attributes = vars(context)
        kept = Kept(attributes, held, self._results.held(results))
        if self._setup_context is None:
            return kept, (), (), True
        context._inputs = inputs
        context._held = held
        output = results[0] if len(results) == 1 else results
        if self._keyword_only:
            keywords = dict(zip(self._keyword_only, arguments[len(inputs) :]))
            self._setup_context(
                ctx=context, inputs=inputs, keyword_only_inputs=keywords, output=output
            )
        else:
            self._setup_context(ctx=context, inputs=inputs, output=output)
        del attributes["_inputs"], attributes["_held"]
        return (
            kept,
            attributes.pop("saved_tensors", ()),
            attributes.pop("_non_differentiable", ()),
            attributes.pop("_materializes_gradients", True),
        )

    def gradients(
        self,
        kept: Kept,
        saved_tensors: tuple[Tensor | None, ...],
        needed: Sequence[bool],
        of_results: tuple[Any, ...],
    ) -> Sequence[Tensor | None]:
        """Return a gradient or None for each tensor among the inputs, also those in lists."""
        context = Context()
        vars(context).update(kept.attributes)
        context.saved_tensors = saved_tensors
        context._needed = needed
        context._held = kept.inputs
        if not self._gives_tensors:
            of_results = _arranged(of_results, kept.results, None)
        found = self._backward(context, *of_results)
        if not isinstance(found, tuple):
            found = (found,)
        names = self._names
        # As torch does, None is taken for inputs that are not there.
        if len(found) < len(names) or any(it is not None for it in found[len(names) :]):
            raise RuntimeError(
                f"{self._name}: backward must return a gradient or None for each input "
                f"({', '.join(names)}), got {len(found)}"
            )
        gradients: list[Tensor | None] = []
        for name, gradient, holds in zip(names, found, kept.inputs):
            if holds == _ONE and (gradient is None or isinstance(gradient, Tensor)):
                gradients.append(gradient)
            elif holds is not None or gradient is not None:
                gradients += self._one_by_one(name, gradient, holds)
        return gradients

    def _one_by_one(self, name: str, gradient: Any, holds: _Holds) -> Sequence[Tensor | None]:
        """Return the gradients of the tensors of a list, or refuse what is none of them."""
        if holds is None or holds == _ONE:
            wanted = "None, since it is no tensor," if holds is None else "a Tensor or None"
        elif gradient is None:
            return [None] * holds
        else:
            is_list = isinstance(gradient, (list, tuple)) and len(gradient) == holds
            if is_list and all(it is None or isinstance(it, Tensor) for it in gradient):
                return gradient
            wanted = f"a list of {holds} gradients (Tensor or None)"
        raise RuntimeError(
            f"{self._name}: backward must return {wanted} for {name}, got {_described(gradient)}"
        )


class CompositeFormula(_Gradients):
    """Gradients of an operator, from a function that computes the same with torch's operators.

    The function is called in the backward pass; until then its inputs are all that is kept. It is
    called by csrc/python/python_formula.cpp, as `Formula` is.
    """

    def __init__(self, operator: torch._ops.OpOverload, composite: Callable[..., Any]) -> None:
        super().__init__(operator)
        self._composite = composite

    def keep(
        self, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[Kept, tuple[Tensor | None, ...], tuple[Tensor, ...], bool]:
        """Return what a call leaves for its backward pass, as `Formula.keep` does."""
        inputs = self._all.held(arguments)
        others = {
            str(place): argument
            for place, (argument, holds) in enumerate(zip(arguments, inputs))
            if holds is None
        }
        kept = Kept(others, inputs, self._results.held(results))
        return kept, tuple(_tensors(arguments, inputs)), (), True

    def gradients(
        self,
        kept: Kept,
        saved_tensors: tuple[Tensor | None, ...],
        needed: Sequence[bool],
        of_results: tuple[Tensor | None, ...],
    ) -> Sequence[Tensor | None]:
        """Return a gradient or None for each tensor among the inputs, also those in lists."""
        places = [place for place, is_needed in enumerate(needed) if is_needed]
        given = [(place, it) for place, it in enumerate(of_results) if _is_gradient(it)]

        def differentiated(*tensors: Tensor) -> tuple[Tensor, ...]:
            inputs = list(saved_tensors)
            for place, tensor in zip(places, tensors):
                inputs[place] = tensor
            results = self._call(kept, inputs)
            return tuple(results[place] for place, _ in given)

        pull_back = torch.func.vjp(differentiated, *(saved_tensors[place] for place in places))[1]
        found = iter(pull_back(tuple(gradient for _, gradient in given)))
        return [next(found) if is_needed else None for is_needed in needed]

    def _call(self, kept: Kept, inputs: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the tensors among the results of the composite, those of lists one by one."""
        arranged = _arranged(inputs, kept.inputs, None)
        arguments = [
            kept.attributes.get(str(place), argument) for place, argument in enumerate(arranged)
        ]
        count = len(arguments) - len(self._keyword_only)
        keywords = dict(zip(self._keyword_only, arguments[count:]))
        results = self._composite(*arguments[:count], **keywords)
        return _tensors(results if isinstance(results, tuple) else (results,), kept.results)


def _is_gradient(value: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether it is there, and no zeros of an integer result."""
    return value is not None and (value.is_floating_point() or value.is_complex())


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(type(it).__name__ for it in value)}]"
    return type(value).__name__


def _tensors(values: Sequence[Any], held: tuple[_Holds, ...]) -> list[Any]:
    """Return the tensors among values, those of lists one by one."""
    tensors: list[Any] = []
    for value, holds in zip(values, held):
        if holds is not None:
            tensors += [value] if holds == _ONE else value
    return tensors


def _arranged(items: Sequence[Any], held: tuple[_Holds, ...], other: Any) -> tuple[Any, ...]:
    """Arrange something for each tensor as the tensors are, in lists where they are."""
    rest = iter(items)
    return tuple(
        [
            other
            if holds is None
            else next(rest)
            if holds == _ONE
            else list(itertools.islice(rest, holds))
            for holds in held
        ]
    )
