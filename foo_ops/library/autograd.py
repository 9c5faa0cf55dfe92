"""Register gradients: operators that compute them, composites, and formulas in Python."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops.compat import (
    Argument,
    DisableFuncTorch,
    DisableTorchDispatch,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchModeKey,
    fake_kernels,
    get_dispatch_mode,
    pytree,
)
from foo_ops.library.operators import (
    BACKWARDS,
    counted,
    end_refusal,
    find,
    keep,
    library_of,
    note,
    own_library,
    refuse_derivatives,
    tensors_in,
)
from foo_ops.library.rules import require_dense

# ----------------------------------------------------------------------------------------- formulas

# Let a formula in Python compute the gradients of calls that are recorded in C++.


_numbers = itertools.count()
# Calls whose contexts hold only these share a key when a backward pass is compiled.
_CONSTANTS = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))

# The tensors in an argument or result: the length of a list, `_ONE` for a tensor, or None.
_Holds = int | None
_ONE = -1
_Flags = tuple[bool | list[bool], ...]


class Context:
    """The ctx of a formula, like that of a torch.autograd.Function.

    Attributes that setup_context sets are available in backward. Attributes that backward sets are
    dropped afterwards, since several threads may run the same backward pass.
    """

    saved_tensors: tuple[Tensor | None, ...] = ()
    _non_differentiable: tuple[Tensor, ...] = ()
    _materializes_gradients = True
    # One flag per tensor; or None, and the flags are those of the inputs.
    _needed: Sequence[bool] | None = None
    _inputs: tuple[Any, ...] = ()
    _held: tuple[_Holds, ...]

    @property
    def needs_input_grad(self) -> _Flags:
        """Whether each input's gradient is needed; a list of flags for a list of tensors."""
        needed = self._needed
        if needed is None:
            tensors = _tensors(self._inputs, self._held)
            needed = [it is not None and it.requires_grad for it in tensors]
        return _arranged(needed, self._held, False)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Save tensors, which become ``saved_tensors``; later changes to them are detected."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark results that have no gradients."""
        self._non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose what stands for a missing gradient: zeros, the default, or None."""
        self._materializes_gradients = value


class Kept(NamedTuple):
    """A call's data for its backward pass, apart from the tensors that its node saves."""

    attributes: dict[str, Any]
    inputs: tuple[_Holds, ...]
    results: tuple[_Holds, ...]


class _Kinds:
    """Finds the values of a schema's arguments or returns that are tensors, or lists of them."""

    def __init__(self, declared: Sequence[Argument]) -> None:
        types = [str(it.type) for it in declared]
        self._are_lists = ["List[" in it and "Tensor" in it for it in types]
        # The same for all calls if no tensor is optional or in a list.
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
    """Finds the tensors among an operator's arguments and results."""

    def __init__(self, operator: OpOverload) -> None:
        arguments, results = operator._schema.arguments, operator._schema.returns
        self._number = next(_numbers)
        self._keyword_only = tuple(it.name for it in arguments if it.kwarg_only)
        self._inputs = _Kinds([it for it in arguments if not it.kwarg_only])
        self._all = _Kinds(arguments)
        self._results = _Kinds(results)

    def key(self, kept: Kept) -> str:
        """Return a key, equal for calls whose backward passes differ only in their tensors."""
        are_constants = all(isinstance(it, _CONSTANTS) for it in kept.attributes.values())
        return f"{self._number} {kept if are_constants else next(_numbers)}"


class Formula(_Gradients):
    """Gradients of an operator, from functions as torch.library.register_autograd takes them.

    Called by csrc/bindings/python_formula.cpp.
    """

    def __init__(
        self,
        operator: OpOverload,
        backward: Callable[..., Any],
        setup_context: Callable[..., None] | None,
    ) -> None:
        """Make a formula.

        Args:
            operator: must be functional, without keyword-only tensors.
            backward: takes the context and the gradients of the results.
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
        """Return a call's data for its backward pass.

        These are: the `Kept` that comes back to the formula, tensors to save, results without
        gradients, and whether zeros stand for missing gradients.
        """
        inputs = arguments[: len(self._names)] if self._keyword_only else arguments
        held = self._inputs.held(inputs)
        context = Context()
        # The context's attributes are kept without a copy: most calls are short, and so is this.
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
        # As torch does, accept more gradients than inputs if the rest are None.
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
        """Return the gradients of a list's tensors, or raise if ``gradient`` does not fit."""
        if holds is None or holds == _ONE:
            wanted = "None" if holds is None else "a Tensor or None"
        elif gradient is None:
            return [None] * holds
        else:
            is_list = isinstance(gradient, (list, tuple)) and len(gradient) == holds
            if is_list and all(it is None or isinstance(it, Tensor) for it in gradient):
                return gradient
            wanted = f"a list of {holds} gradients (Tensor or None)"
        reason = ", which is not a tensor" if holds is None else ""
        raise RuntimeError(
            f"{self._name}: backward must return {wanted} for {name}{reason}, got "
            f"{_described(gradient)}"
        )


class CompositeFormula(_Gradients):
    """Gradients of an operator, from a function that computes the same with torch's operators.

    The function is called in the backward pass; until then only its inputs are kept. Like
    `Formula`, this is called by csrc/bindings/python_formula.cpp.
    """

    def __init__(self, operator: OpOverload, composite: Callable[..., Any]) -> None:
        super().__init__(operator)
        self._composite = composite

    def keep(
        self, arguments: tuple[Any, ...], results: tuple[Any, ...]
    ) -> tuple[Kept, tuple[Tensor | None, ...], tuple[Tensor, ...], bool]:
        """Return a call's data for its backward pass, as `Formula.keep` does."""
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
        """Call the composite; return the tensors among its results, with lists flattened."""
        arranged = _arranged(inputs, kept.inputs, None)
        arguments = [
            kept.attributes.get(str(place), argument) for place, argument in enumerate(arranged)
        ]
        count = len(arguments) - len(self._keyword_only)
        keywords = dict(zip(self._keyword_only, arguments[count:]))
        results = self._composite(*arguments[:count], **keywords)
        return _tensors(results if isinstance(results, tuple) else (results,), kept.results)


def _is_gradient(value: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether there is a gradient, other than the zeros of an integer result."""
    return value is not None and (value.is_floating_point() or value.is_complex())


def _described(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(type(it).__name__ for it in value)}]"
    return type(value).__name__


def _tensors(values: Sequence[Any], held: tuple[_Holds, ...]) -> list[Any]:
    """Return the tensors among values, with lists flattened."""
    tensors: list[Any] = []
    for value, holds in zip(values, held):
        if holds is not None:
            tensors += [value] if holds == _ONE else value
    return tensors


def _arranged(items: Sequence[Any], held: tuple[_Holds, ...], other: Any) -> tuple[Any, ...]:
    """Arrange one item per tensor as the values are, in lists and with ``other`` for the rest."""
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


# -------------------------------------------------------------------------------- refused arguments

# Let composites refuse the arguments that their operator refuses.


def refusing(name: str, composite: Callable[..., Any]) -> Callable[..., Any]:
    """Return a composite that refuses the arguments that its operator refuses.

    PyTorch's own operators accept more: they promote dtypes, broadcast shapes, and some take nested
    tensors. The operator's fake kernel checks all else but the values of elements.
    """
    operator = find(name)
    names = [argument.name for argument in operator._schema.arguments]

    @functools.wraps(composite)
    def checked(*args: Any, **kwargs: Any) -> Any:
        require_dense(operator, dict(zip(names, args)) | kwargs)
        fake = fake_kernels.find(operator.name()).fake_impl.kernel
        if fake is not None and all(
            it.layout == torch.strided for it in tensors_in((args, kwargs))
        ):
            with _modes_for_fakes():
                positional, named = pytree.tree_map_only(Tensor, _without_data, (args, kwargs))
                fake(*positional, **named)
        return composite(*args, **kwargs)

    return checked


@contextlib.contextmanager
def _modes_for_fakes() -> Iterator[None]:
    """Disable dispatch modes, unless one makes fake tensors, whose sizes may be symbols.

    Other modes would read tensors without data, or count the calls on them.
    """
    if get_dispatch_mode(TorchDispatchModeKey.FAKE) is not None:
        yield
        return
    with DisableFuncTorch(), DisableTorchDispatch():
        yield


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# ------------------------------------------------------------------------------------- registration


def register_autograd(
    op: str | OpOverload | torch.library.CustomOpDef,
    backward: Callable[..., Any] | str | OpOverload | None = None,
    /,
    *,
    setup_context: Callable[..., None] | None = None,
    composite: Callable[..., Any] | None = None,
    lib: torch.library.Library | None = None,
) -> None:
    """Register gradients; a call that needs none enters no Python.

    There are three ways to define them:

    - ``backward`` names an operator that computes the gradients. A call that needs some is recorded
      in C++, as calls of PyTorch's own operators are, and torch.func differentiates it. The names
      of the backward operator's arguments identify them: an argument of ``op``, a result of ``op``,
      ``grad_<result>``, or ``<argument>_requires_grad``, a bool. If the results of ``op`` have no
      names, all other names stand for their gradients, in order. If nothing depends on a result,
      its gradient is None where that is optional, and zeros otherwise. A result whose gradient the
      backward operator does not take, such as a statistic kept for it, has no gradient. A tensor
      that is optional in the backward operator but not in ``op`` is a factor of the gradients of
      others, and is saved if one of those is needed. The results are ``grad_<argument>``, or
      without names one for each tensor. Second derivatives are those of the backward operator;
      without any it refuses to be differentiated.
    - ``composite`` computes the same as ``op`` with PyTorch's own operators. It is called for the
      tangents of forward-mode differentiation. Without ``backward`` it is differentiated in the
      backward pass, so derivatives of every order follow from it, and recorded calls run at the
      operator's own speed.
    - ``backward`` is a formula in Python, as torch.library.register_autograd takes it. A call that
      needs gradients is recorded in C++ as well, and enters Python for ``setup_context`` only.
      torch.func differentiates it.

    Args:
        op: the operator, such as ``"foo::abs"``; its schema must be functional.
        backward: ``"foo::abs_backward"``, or ``backward(ctx, *gradients)``, which returns a
            gradient or None for each input.
        setup_context: ``setup_context(ctx, inputs, output)`` saves what a formula needs; if the
            schema has keyword-only arguments, it takes ``keyword_only_inputs``, too.
        composite: takes the arguments of the operator and returns its results.
        lib: the registration ends with this library; by default, with the process.

    Raises:
        TypeError: for a backward operator whose names or types do not fit.
        RuntimeError: for a formula of an operator that writes to its arguments.
        NotImplementedError: for a formula of an operator with keyword-only tensors.

    Example:
        >>> foo_ops.library.define("mylib::times", "(Tensor x, float by) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::times", "cpu", foo_ops.library.elementwise_kernel(lambda x, by: by * x)
        ... )
        >>> foo_ops.library.define("mylib::times_backward", "(Tensor grad, float by) -> Tensor")
        >>> foo_ops.library.register_kernel(
        ...     "mylib::times_backward",
        ...     "cpu",
        ...     foo_ops.library.elementwise_kernel(lambda grad, by: by * grad),
        ... )
        >>> foo_ops.library.register_autograd(
        ...     "mylib::times", "mylib::times_backward", composite=lambda x, by: by * x
        ... )
        >>> torch.func.grad(lambda x: torch.ops.mylib.times(x, 3.0))(torch.tensor(1.0))
        tensor(3.)
    """
    name = find(op).name()
    lib = own_library(op, lib)
    if isinstance(op, torch.library.CustomOpDef):
        op.register_autograd(_only_formula(op, backward, composite), setup_context=setup_context)
        return
    if isinstance(backward, OpOverloadPacket):
        backward = backward.default
    if isinstance(backward, OpOverload):
        backward = backward.name()
    formula: Formula | CompositeFormula | None = None
    if callable(backward):
        formula = _formula(name, backward, setup_context)
    elif setup_context is not None:
        raise TypeError(
            f"{name}: setup_context must be None unless backward is a Python function, got "
            f"{setup_context!r}"
        )
    if backward is None and composite is None:
        raise TypeError(f"{name}: register_autograd must be given backward, composite or both")
    if not (backward is None or callable(backward) or isinstance(backward, str)):
        raise TypeError(
            f"{name}: backward must be the name of an operator, or a function, got {backward!r}"
        )
    if isinstance(backward, str):
        backward = find(backward).name()
    if composite is not None:
        composite = counted(name, "composite", composite)
    if backward is None and composite is not None:
        formula = CompositeFormula(_functional(name), composite)
    end_refusal(name)
    if composite is not None:
        _register_on_autograd_key(name, refusing(name, composite), lib)
    tangents = _C.Tangents.not_implemented if composite is None else _C.Tangents.composite
    if formula is not None:
        keep(_C.register_formula(name, formula, tangents), lib)
    elif isinstance(backward, str):
        keep(_C.register_backward_operator(name, backward, tangents), lib)
        note(BACKWARDS, name, backward, lib)
        message = (
            f"{backward}: it has no derivative, since it computes the gradients of {name}; to get "
            "one, register a composite for it with foo_ops.library.register_autograd"
        )
        refuse_derivatives(backward, message, lib)


def _only_formula(
    op: torch.library.CustomOpDef, backward: Any, composite: Callable[..., Any] | None
) -> Callable[..., Any]:
    """Return the formula for an operator of torch.library.custom_op, which takes nothing else."""
    if composite is not None or not callable(backward) or hasattr(backward, "_schema"):
        raise TypeError(
            f"{op._qualname}: an operator of custom_op must have a Python function as backward and "
            "no composite"
        )
    return backward


def _functional(name: str) -> OpOverload:
    operator = find(name)
    schema = operator._schema
    if schema.is_mutable or not schema.returns:
        raise RuntimeError(
            f"{name}: an operator with a formula must write to no argument and have results, got "
            f"{schema}"
        )
    return operator


def _formula(name: str, backward: Any, setup_context: Callable[..., None] | None) -> Formula:
    operator = _functional(name)
    arguments = operator._schema.arguments
    tensors = [it.name for it in arguments if it.kwarg_only and "Tensor" in str(it.type)]
    if tensors:
        raise NotImplementedError(
            f"{name}: an operator with a formula must not have keyword-only tensors, got "
            f"{', '.join(tensors)}"
        )
    return Formula(operator, backward, setup_context)


def _register_on_autograd_key(
    name: str, function: Callable[..., Any], lib: torch.library.Library | None
) -> None:
    library_of(name, lib).impl(name.partition("::")[2], function, "Autograd")
