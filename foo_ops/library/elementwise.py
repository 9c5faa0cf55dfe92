"""Make kernels and fake kernels from one function of scalars."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from foo_ops import _C
from foo_ops._operators import is_declared
from foo_ops.compat import OpOverload, has_kernel
from foo_ops.kernels.compiler.kernel import Maker
from foo_ops.library.kernels import (
    Launcher,
    NumbaKernel,
    add_source,
    check_parameters,
    check_returned,
    cpp_parameter,
    kinds_of,
    refuse_whole,
    require_function,
)
from foo_ops.library.operators import (
    BACKWARDS,
    COMPLEX,
    FLOATING,
    VARIANTS,
    Parameter,
    Sizes,
    define_or_take,
    dtype_name,
    end_refusal,
    find,
    have_sizes,
    in_words,
    is_known,
    keep,
    library_of,
    note,
    own_library,
    parameters_of,
    refuse_derivatives,
    require_dtypes,
    with_choices,
)
from foo_ops.library.rules import (
    count_elementwise,
    make_elementwise_rule,
    make_elementwise_sharding,
)

# ------------------------------------------------------------------------------------- fake kernels

# Make the fake kernels of elementwise operators, which lay out results as TensorIterator does.


CPU = torch.device("cpu")


def make_fake(
    operator: OpOverload,
    parameters: Sequence[Parameter],
    elementwise: Any,
    gradients_of: Sequence[str],
) -> Callable[..., Any]:
    """Make the fake kernel of an operator.

    Args:
        operator: the operator.
        parameters: its arguments.
        elementwise: its launcher.
        gradients_of: for each result the argument without which it is None, or "".
    """

    def fake(*args: Any, **kwargs: Any) -> Any:
        given = {p.name: argument for p, argument in zip(parameters, args)} | kwargs
        tensors = [given.get(p.name) if p.is_tensor else None for p in parameters]
        there = [(p, tensor) for p, tensor in zip(parameters, tensors) if tensor is not None]
        inputs = [tensor for p, tensor in there if p.role != "out"]
        outputs = [tensor for p, tensor in there if p.role != "read"]
        types = elementwise.result_types([given.get(p.name) for p in parameters])
        if outputs:
            shape = _broadcast_shape(inputs)
            elementwise.check_targets(tensors, shape)
            results = [
                output if have_sizes(output.shape, shape) else output.resize_(shape)
                for output in outputs
            ]
        else:
            (shape, strides), device = _layout(inputs), _common_device(inputs)
            results = [
                torch.empty_strided(shape, strides, dtype=dtype, device=device) for dtype in types
            ]
            for position, name in enumerate(gradients_of):
                if name and given.get(name) is None:
                    results[position] = None
        count = len(operator._schema.returns)
        return results[0] if count == 1 else tuple(results[:count]) or None

    return fake


def _common_device(inputs: Sequence[Tensor]) -> torch.device:
    """Find the device as TensorIterator does: a 0-d tensor on cpu goes with any."""
    return next((tensor.device for tensor in inputs if tensor.device.type != "cpu"), CPU)


def _broadcast_shape(inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    # Imported here, since torch._refs takes 0.1 s, and a fake kernel runs under compilation.
    from foo_ops.compat import broadcast_shapes

    return tuple(broadcast_shapes(*(tensor.shape for tensor in inputs)))


def _layout(inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return shape and strides of a result, as TensorIterator chooses them."""
    from foo_ops.compat import (
        elementwise_output_strides,
        is_contiguous_or_false,
        make_contiguous_strides_for,
    )

    shape = _broadcast_shape(inputs)
    # TensorIterator's own first check; it matters for empty tensors and dimensions of size 1.
    if all(_has_shape(tensor, shape) and is_contiguous_or_false(tensor) for tensor in inputs):
        return shape, make_contiguous_strides_for(shape)
    expanded = (tensor.expand(shape) for tensor in inputs)
    return shape, elementwise_output_strides(*expanded)


def _has_shape(tensor: Tensor, shape: Sizes) -> bool:
    pairs = zip(tensor.shape, shape)
    return tensor.dim() == len(shape) and all(is_known(size == other) for size, other in pairs)


# ------------------------------------------------------------------------------------------ kernels

# Make kernels from one function of scalars.


_MAKER = Maker("foo_ops.kernels.user.elementwise", "make_elementwise_kernel")

_UNSIGNED_OF_SIZE = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}

Dtypes = Iterable[torch.dtype]

# One dtype per result, None for that of the inputs; or a mapping from the dtype of the inputs.
ResultType = (
    torch.dtype
    | None
    | Sequence[torch.dtype | None]
    | Mapping[torch.dtype, torch.dtype | Sequence[torch.dtype]]
)

# A function of scalars, or a kernel made from one, with a ``backward`` of its own.
Backward: TypeAlias = "Callable[..., Any] | ElementwiseKernel"


@dataclasses.dataclass(frozen=True)
class _Variant:
    """The function for a dtype, the results' dtypes, and whether it works on the bits."""

    function: Callable[..., Any]
    results: tuple[torch.dtype | None, ...] | None
    on_bits: bool


@dataclasses.dataclass(frozen=True)
class ElementwiseKernel(NumbaKernel):
    """A kernel that `elementwise_kernel` makes."""

    function: Callable[..., Any]
    variants: Mapping[torch.dtype, _Variant]
    backward: Backward | None = None
    own_dtypes: Mapping[str, tuple[torch.dtype, ...]] = dataclasses.field(default_factory=dict)
    # For each result the optional tensor whose gradient it is, or "".
    gradients_of: tuple[str, ...] = ()
    # Choices of strings that the function does not annotate.
    choices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def overload(
        self,
        function: Callable[..., Any],
        dtypes: Dtypes,
        *,
        result_type: ResultType = None,
        on_bits: bool = False,
    ) -> ElementwiseKernel:
        """Add another function for some dtypes. See `elementwise_kernel`."""
        added = _variants(function, dtypes, result_type, on_bits)
        return dataclasses.replace(self, variants={**self.variants, **added})

    def launcher(self, operator: OpOverload, parameters: Sequence[Parameter]) -> Launcher:
        results = len(operator._schema.returns) or sum(p.role != "read" for p in parameters)
        refuse_whole(operator, parameters)
        functions = [variant.function for variant in self.variants.values()]
        check_parameters(operator, parameters, functions, self.own_dtypes.keys())
        check_returned(operator, functions, results)
        parameters = self.with_choices(operator, parameters)
        types = {
            dtype: _result_types(operator, dtype, variant, results)
            for dtype, variant in self.variants.items()
        }
        elementwise = _C.Elementwise(
            operator.name(),
            self._add_source(operator, parameters, types),
            [self._cpp_parameter(parameter) for parameter in parameters],
            {dtype: list(results) for dtype, results in types.items()},
            in_words(self.variants),
            self._depends_on(parameters),
        )
        return Launcher(
            lambda key: (elementwise.register_for(key),),
            make_fake(operator, parameters, elementwise, self.gradients_of),
            make_elementwise_rule(operator.name(), parameters, self.own_dtypes),
            make_elementwise_sharding(operator),
        )

    def with_choices(
        self, operator: OpOverload, parameters: Sequence[Parameter]
    ) -> tuple[Parameter, ...]:
        return with_choices(operator, parameters, self.function, self.choices)

    def register(
        self,
        operator: OpOverload,
        keys: Sequence[str],
        lib: torch.library.Library | None,
    ) -> None:
        has_gradients = self.backward is not None and not operator._schema.is_mutable
        if has_gradients:
            refuse_other_backward(operator.name(), self.backward)
        super().register(operator, keys, lib)
        count_elementwise(operator, self.function)
        if has_gradients:
            _register_backward(self, operator, keys, lib)

    def _depends_on(self, parameters: Sequence[Parameter]) -> tuple[int, ...]:
        """Return for each result the position of the argument without which it is None, or -1."""
        places = {parameter.name: place for place, parameter in enumerate(parameters)}
        return tuple(places.get(name, -1) for name in self.gradients_of)

    def _cpp_parameter(self, parameter: Parameter) -> Any:
        own = self.own_dtypes.get(parameter.name)
        return cpp_parameter(parameter, *((list(own), in_words(own)) if own else ()))

    def _add_source(
        self,
        operator: OpOverload,
        parameters: Sequence[Parameter],
        types: Mapping[torch.dtype, tuple[torch.dtype, ...]],
    ) -> str:
        functions = list(dict.fromkeys(variant.function for variant in self.variants.values()))
        variants = {}
        for dtype, variant in self.variants.items():
            storage = _bits if variant.on_bits else dtype_name
            position = functions.index(variant.function)
            variants[dtype_name(dtype)] = (
                position,
                storage(dtype),
                tuple(map(storage, types[dtype])),
            )
        inputs = [p for p in parameters if p.role != "out"]
        kinds = tuple(
            kind.replace("tensor", "own") if p.name in self.own_dtypes else kind
            for p, kind in zip(inputs, kinds_of(inputs))
        )
        depends_on = self._depends_on(inputs)
        return add_source(operator, functions, _MAKER, kinds, variants, depends_on)


def _bits(dtype: torch.dtype) -> str:
    return _UNSIGNED_OF_SIZE[dtype.itemsize]


@overload
def elementwise_kernel(
    function: Callable[..., Any],
    /,
    *,
    dtypes: Dtypes = ...,
    result_type: ResultType = ...,
    on_bits: bool = ...,
    backward: Backward | None = ...,
    own_dtypes: Mapping[str, Dtypes] | None = ...,
) -> ElementwiseKernel: ...


@overload
def elementwise_kernel(
    function: None = None,
    /,
    *,
    dtypes: Dtypes = ...,
    result_type: ResultType = ...,
    on_bits: bool = ...,
    backward: Backward | None = ...,
    own_dtypes: Mapping[str, Dtypes] | None = ...,
) -> Callable[[Callable[..., Any]], ElementwiseKernel]: ...


def elementwise_kernel(
    function: Callable[..., Any] | None = None,
    /,
    *,
    dtypes: Dtypes = FLOATING,
    result_type: ResultType = None,
    on_bits: bool = False,
    backward: Backward | None = None,
    own_dtypes: Mapping[str, Dtypes] | None = None,
) -> Any:
    """Make a kernel from a function of scalars, for `register_kernel`.

    The function is called for each element with the operator's arguments in the order of its
    schema: a number for each tensor and for each float, int and bool, None for a missing argument.
    It returns a number, or a tuple with one for each result. Numba compiles it at its first use for
    a dtype, LLVM vectorises it. It must not allocate, raise, or call Python. Globals and closure
    variables are constants, with the values of its first use, whatever the dtype. A division by
    zero gives inf or NaN, and 0 for integers.

    Tensors may have any strides; they are broadcast and promoted to a common dtype. float16 and
    bfloat16 are computed in float32, other floats in their own type, and so are arguments of type
    float. Constants do not promote, as in torch: ``x * 0.5`` is computed in x's type. Integers come
    in their own type and are computed in 64 bits: in uint64 if both operands are unsigned, else in
    int64. The same kernel serves ``f``, ``f_`` and ``f.out``, and each gets its fake kernel.

    Args:
        function: the function; if omitted, returns a decorator.
        dtypes: the accepted common dtypes; by default all floating-point ones.
        result_type: dtypes of the results: None for the common dtype, a dtype, a sequence of these
            for several results, or a mapping from the common dtype.
        on_bits: pass the elements' bits to the function as unsigned integers, and take the results'
            bits from it. ``kernel.overload(function, dtypes, ...)`` adds a function for other
            dtypes.
        backward: ``backward(*gradients, *arguments)``, a scalar function too, returns the gradient
            of each tensor among the arguments: a number, or a tuple. The gradient of a tensor that
            can have none, such as a mask, is ignored. For second derivatives, give an
            ``elementwise_kernel(function, backward=...)`` instead of a function; the arguments of
            its ``backward`` are the gradients of the first backward's results, then that backward's
            own arguments, and so on.
        own_dtypes: the accepted dtypes of tensors that are not promoted with the others, by their
            names in the schema: ``{"mask": (torch.bool,)}``. The function gets their elements in
            their own dtype, and the common dtype does not depend on them.

    Example:
        >>> @foo_ops.library.elementwise_kernel(backward=lambda grad, x: 2 * x * grad)
        ... def square(x):
        ...     return x * x
    """

    def make(function: Callable[..., Any]) -> ElementwiseKernel:
        variants = _variants(function, dtypes, result_type, on_bits)
        own = {
            name: require_dtypes(f"elementwise_kernel: own_dtypes of {name}", taken)
            for name, taken in (own_dtypes or {}).items()
        }
        if not isinstance(backward, (ElementwiseKernel, type(None))):
            require_function("elementwise_kernel: backward must be", backward)
        return ElementwiseKernel(function, variants, backward, own)

    return make if function is None else make(function)


def _variants(
    function: Callable[..., Any], dtypes: Dtypes, result_type: ResultType, on_bits: bool
) -> dict[torch.dtype, _Variant]:
    def results(dtype: torch.dtype) -> tuple[torch.dtype | None, ...] | None:
        if isinstance(result_type, Mapping) and dtype not in result_type:
            raise TypeError(
                "elementwise_kernel: result_type must have an entry for each of dtypes, got none "
                f"for {dtype}"
            )
        type_ = result_type[dtype] if isinstance(result_type, Mapping) else result_type
        if type_ is None or isinstance(type_, torch.dtype):
            return None if type_ is None else (type_,)
        return tuple(type_)

    require_function("elementwise_kernel must be given", function)
    taken = require_dtypes("elementwise_kernel: dtypes", dtypes)
    return {dtype: _Variant(function, results(dtype), on_bits) for dtype in taken}


def _result_types(
    operator: OpOverload, dtype: torch.dtype, variant: _Variant, count: int
) -> tuple[torch.dtype, ...]:
    results = variant.results or (None,) * count
    if len(results) != count:
        raise TypeError(
            f"{operator.name()}: result_type must have {count} dtypes, one for each result, "
            f"got {len(results)}"
        )
    return tuple(result or dtype for result in results)


@dataclasses.dataclass(frozen=True)
class _OwnBackward:
    """An entry of `BACKWARD_SCHEMAS`, which ends with the operator's library."""

    name: str

    def destroy(self) -> None:
        del BACKWARD_SCHEMAS[self.name]


BACKWARD_SCHEMAS: dict[str, tuple[str, tuple[torch.Tag, ...]]] = {}
"""Schemas and tags of the operators that were defined for a ``backward``."""


def refuse_other_backward(name: str, backward: Backward | None) -> None:
    """Refuse a ``backward`` whose operator would replace another one of the same name."""
    defined = name
    while backward is not None:
        defined += "_backward"
        is_ours = defined in BACKWARD_SCHEMAS or is_declared(defined)
        if has_kernel(defined) and not is_ours:
            raise ValueError(
                f"{name}: backward defines the operator {defined}, which must not exist yet, "
                f"got {find(defined)._schema}"
            )
        backward = backward.backward if isinstance(backward, ElementwiseKernel) else None


def _register_backward(
    kernel: ElementwiseKernel,
    operator: OpOverload,
    keys: Sequence[str],
    lib: torch.library.Library | None,
) -> None:
    """Define ``f_backward(gradients, arguments)``, and make it the formula of ``f``."""
    assert kernel.backward is not None
    name, parameters = operator.name(), parameters_of(operator)
    results = len(operator._schema.returns)
    if f"{name}_backward" not in BACKWARD_SCHEMAS:
        _define_backward(operator, parameters, results, lib)
        tangents = _C.Tangents.partial_derivatives
        end_refusal(name)
        keep(_C.register_backward_operator(name, f"{name}_backward", tangents), lib)
        note(BACKWARDS, name, f"{name}_backward", lib)
    derivative = _derivative(kernel, operator)
    derivative.register(find(f"{name}_backward"), keys, lib)
    if derivative.backward is None:
        message = (
            f"{name}: backward= has no derivative; pass elementwise_kernel(function, "
            "backward=...) as backward=, or register a formula with "
            "foo_ops.library.register_autograd instead"
        )
        refuse_derivatives(f"{name}_backward", message, lib)


def _derivative(kernel: ElementwiseKernel, operator: OpOverload) -> ElementwiseKernel:
    """Make the kernel of ``f_backward``, which takes gradients and the arguments of ``f``."""
    parameters = kernel.with_choices(operator, parameters_of(operator))
    tensors = [p for p in parameters if p.is_tensor]
    inherited: dict[str, Any] = {
        "choices": {p.name: p.choices for p in parameters},
        "gradients_of": tuple(p.name if p.is_optional else "" for p in tensors)
        if any(p.is_optional for p in tensors)
        else (),
    }
    if isinstance(kernel.backward, ElementwiseKernel):
        own = {**kernel.own_dtypes, **kernel.backward.own_dtypes}
        return dataclasses.replace(kernel.backward, own_dtypes=own, **inherited)
    assert kernel.backward is not None
    count = len(operator._schema.returns)
    dtypes = {
        functools.reduce(torch.promote_types, _result_types(operator, dtype, variant, count), dtype)
        for dtype, variant in kernel.variants.items()
    }
    differentiable = [dtype for dtype in FLOATING + COMPLEX if dtype in dtypes]
    derivative: ElementwiseKernel = elementwise_kernel(
        kernel.backward, dtypes=differentiable, own_dtypes=kernel.own_dtypes
    )
    return dataclasses.replace(derivative, **inherited)


def _define_backward(
    operator: OpOverload,
    parameters: Sequence[Parameter],
    results: int,
    lib: torch.library.Library | None,
) -> None:
    of_results = [str(result.type) for result in operator._schema.returns]
    names = _gradient_names(parameters, results)
    arguments = [
        f"Tensor{'?' * ('Optional' in type_)} {name}" for type_, name in zip(of_results, names)
    ] + [f"{p.schema_type} {p.name}" for p in parameters]
    gradients = [p.schema_type for p in parameters if p.is_tensor]
    returned = gradients[0] if len(gradients) == 1 else f"({', '.join(gradients)})"
    name = f"{operator.name()}_backward"
    schema = f"({', '.join(arguments)}) -> {returned}"
    library, tags = library_of(operator.name(), lib), (torch.Tag.pt2_compliant_tag,)
    # Not `made` itself, which holds the library: it would never end.
    made = define_or_take(name, None, schema, tags, library)
    BACKWARD_SCHEMAS[name] = made.schema, made.tags
    keep(_OwnBackward(name), library)


def _gradient_names(parameters: Sequence[Parameter], count: int) -> list[str]:
    """Return grad0 and so on; grad_grad0 for a backward, whose arguments are called grad0."""
    prefix = "grad"
    while any(p.name.startswith(prefix) for p in parameters):
        prefix = f"grad_{prefix}"
    return [f"{prefix}{position}" for position in range(count)]


def register_variant_autograd(
    op: str | OpOverload, /, *, lib: torch.library.Library | None = None
) -> None:
    """Register autograd for the in-place or out variant of an operator that has gradients.

    In place, ``f_(a)`` is differentiated as ``a.copy_(f(a.clone()))``, which handles views and
    versions. An out variant refuses tensors that need a gradient, as torch's own do.

    Example:
        >>> kernel = foo_ops.library.elementwise_kernel(lambda x: 5.0 * x)
        >>> foo_ops.library.define("mylib::fivefold", "(Tensor input) -> Tensor")
        >>> foo_ops.library.register_kernel("mylib::fivefold", "cpu", kernel)
        >>> foo_ops.library.register_autograd("mylib::fivefold", lambda ctx, grad: 5.0 * grad)
        >>> foo_ops.library.define("mylib::fivefold_", "(Tensor(a!) input) -> Tensor(a!)")
        >>> foo_ops.library.register_kernel("mylib::fivefold_", "cpu", kernel)
        >>> foo_ops.library.register_variant_autograd("mylib::fivefold_")
        >>> input = torch.ones(2, requires_grad=True)
        >>> torch.ops.mylib.fivefold_(input.clone()).sum().backward()
        >>> input.grad
        tensor([5., 5.])
    """
    name = find(op).name()
    end_refusal(name)
    keep(_C.register_variant_autograd(name), own_library(name, lib))
    if name.endswith("_"):
        note(VARIANTS, name, name.removesuffix("_"), own_library(name, lib))
