"""Operators, their names and schemas, and formulas for their gradients."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.library import Library

from foo_ops.compat import (
    AutoDispatchBelowAutograd,
    DispatchKeySet,
    OpOverload,
    after_autograd_keyset,
    any_requires_grad,
    find_schema,
    has_computed_kernel_for_key,
    has_kernel_for_key,
    pytree,
    set_report_error_callback,
)
from foo_ops.library import operators, register_autograd
from foo_ops.library.operators import DISPATCH_KEYS

# -------------------------------------------------------------------------------- names and schemas


# Namespaces of PyTorch itself.
RESERVED_NAMESPACES = {"prim", "prims", "aten", "at", "torch", "pytorch"}


def parse(qualname: str) -> tuple[str, str]:
    """Return namespace and name, or refuse a name: in torch's words, if torch refuses it."""
    if isinstance(qualname, str):
        _refuse_as_torch_does(*qualname.partition("::"))
    namespace, name, _ = operators.parse(qualname)
    return namespace, name


def _refuse_as_torch_does(namespace: str, separator: str, name: str) -> None:
    qualname = namespace + separator + name
    if not separator:
        raise ValueError(
            f"Expected there to be a namespace in {qualname}, i.e. The operator name should look "
            "something like ns::foo"
        )
    if "." in name:
        raise ValueError(
            "The torch.custom_ops APIs do not handle overloads, i.e. operator names with '.' in "
            f"them. Please name your operator something like ns::foo. Got: {qualname}"
        )
    if "." in namespace:
        raise ValueError(
            f'custom_op(..., ns="{namespace}"): expected ns to not contain any . (and be a valid '
            "variable name)"
        )


def validate_namespace(namespace: str) -> None:
    if namespace in RESERVED_NAMESPACES:
        raise ValueError(
            f"custom_op(..., ns='{namespace}'): '{namespace}' is a reserved namespace, please "
            "choose something else. "
        )


def validate_schema(schema: Any) -> None:
    is_view = any(r.annotation is not None and not r.annotation.is_write for r in schema.returns)
    if schema.is_mutable or is_view or not schema.returns:
        raise ValueError(
            "custom_op only supports functional operators (ops that do not mutate any inputs, do "
            "not return views of the inputs, and has at least one return). Got the following "
            f"non-functional schema: {schema}"
        )
    if schema.arguments.self_arg is not None:
        raise ValueError(
            "custom_op does not support arguments named 'self'. Please rename your argument. Got: "
            f"{schema}"
        )


# ---------------------------------------------------------------------------------------- gradients


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


# ---------------------------------------------------------------------------------------- operators


class CustomOp:
    """An operator and its registrations.

    Attributes:
        qualname: ``"namespace::name"``.
        schema: the parsed schema.
        library: the library of its definition and kernels.
        locations: the place of each registration, by its kind, such as ``cpu`` or ``backward``.
    """

    def __init__(self, qualname: str, schema: Any, library: Library) -> None:
        self.qualname = qualname
        self.schema = schema
        self.library = library
        self.locations: dict[str, str] = {}
        self._parts: dict[str, Callable[..., Any]] = {}
        self._output_differentiability: list[bool] | None = None
        # Stands in for a formula until both halves are registered.
        self._stand_in: Library | None = None
        self._has_formula = False

    def __repr__(self) -> str:
        return f'<CustomOp(op="{self.qualname}")>'

    @property
    def name(self) -> str:
        return self.qualname.partition("::")[2]

    def destroy(self) -> None:
        for library in (self.library, self._stand_in):
            if library is not None:
                library._destroy()
        del OPERATORS[self.qualname]

    def register_kernel(
        self, device_type: str, function: Callable[..., Any], location: str
    ) -> None:
        key = DISPATCH_KEYS[device_type]
        if device_type not in self.locations and _has_kernel(self.qualname, key):
            raise RuntimeError(
                f"impl(..., device_types={device_type}): the operator {self.qualname} already has "
                "an implementation for this device type via a pre-existing torch.library or "
                "TORCH_LIBRARY registration."
            )
        self._note(device_type, location)
        self.library.impl(self.name, function, key)

    def _note(self, kind: str, location: str) -> None:
        if kind in self.locations:
            raise RuntimeError(
                f"Attempting to register a {kind} impl for operator {self.qualname} that already "
                f"has a {kind} impl registered from Python at {self.locations[kind]}. This is not "
                "supported."
            )
        self.locations[kind] = location

    # ------------------------------------------------------------------------------- gradients

    def set_output_differentiability(self, differentiability: list[bool] | None) -> None:
        if differentiability is None:
            return
        if (
            not isinstance(differentiability, list)
            or not all(isinstance(flag, bool) for flag in differentiability)
            or len(differentiability) != len(self.schema.returns)
        ):
            raise RuntimeError(
                "impl_backward(output_differentiability): expected output_differentiability to be "
                "a list of bools with length equal to the number of outputs of this CustomOp got: "
                f"{differentiability}"
            )
        self._output_differentiability = differentiability

    def register_formula_part(self, kind: str, function: Callable[..., Any], location: str) -> None:
        """Register one half; with the second one, register the formula."""
        self._check_can_have_formula()
        if self._stand_in is None and not self._has_formula:
            self._check_has_no_other_formula()
            self.stand_in_for_formula()
        self._note(kind, location)
        self._parts[kind] = function
        if len(self._parts) == 2:
            self._register_formula()

    def stand_in_for_formula(self) -> None:
        """Let calls that need a formula raise until there is one."""
        operator = find_overload(self.qualname)

        def kernel(keyset: DispatchKeySet, *args: Any, **keywords: Any) -> Any:
            self._raise_if_half_a_formula()
            if torch.is_grad_enabled() and any_requires_grad(*args, **keywords):
                raise RuntimeError("Autograd has not been implemented for operator")
            with AutoDispatchBelowAutograd():
                below = keyset & after_autograd_keyset
                return operator.redispatch(below, *args, **keywords)

        self._stand_in = Library(self.qualname.partition("::")[0], "FRAGMENT")
        self._stand_in.impl(self.name, kernel, "Autograd", with_keyset=True)

    def _raise_if_half_a_formula(self) -> None:
        if not self._parts:
            return
        (found,) = self._parts
        missing = "save_for_backward" if found == "backward" else "backward"
        raise RuntimeError(
            f"We found a '{found}' registration for {self} at {self.locations[found]} but were "
            f"unable to find a '{missing}' registration. To use the CustomOp API to register a "
            "backward formula, please provide us both a backward function and a 'save for "
            "backward' function via `impl_backward` and `impl_save_for_backward` respectively."
        )

    def _register_formula(self) -> None:
        assert self._stand_in is not None
        self._stand_in._destroy()
        self._stand_in = None
        self._has_formula = True
        where = f"{self} at {self.locations['backward']}"
        formula = Formula(self.schema, where, self._parts, self._output_differentiability)
        register_autograd(
            self.qualname, formula.backward, setup_context=formula.setup_context, lib=self.library
        )

    def _check_can_have_formula(self) -> None:
        from torchgen.model import SchemaKind

        returns = self.schema.returns
        if self.schema.kind() != SchemaKind.functional:
            self._refuse_formula("non-functional operator")
        if not returns:
            self._refuse_formula("operator with no returns")
        if any(r.annotation is not None and not r.annotation.is_write for r in returns):
            self._refuse_formula("operator that returns views")
        allowed = {
            "int": "int",
            "SymInt": "SymInt",
            "bool": "bool",
            "float": "float",
            "Tensor": "Tensor",
            "Tensor[]": "List[Tensor]",
        }
        for result in returns:
            if str(result.type) not in allowed:
                self._refuse_formula(
                    f"operator with return not in {list(allowed.values())} (got {result.type})"
                )

    def _refuse_formula(self, detail: str) -> NoReturn:
        raise RuntimeError(
            f"Cannot use torch._custom_ops APIs to register backward formula for {detail}. Got "
            f"operator {self.qualname} with schema: {self.schema}"
        )

    def _check_has_no_other_formula(self) -> None:
        has = functools.partial(has_kernel_for_key, self.qualname)
        if has("CompositeImplicitAutograd"):
            raise RuntimeError(
                f"impl_backward/impl_save_for_backward: the operator {self.qualname} already has "
                "an implementation for this device type via a pre-existing registration to "
                "DispatchKey::CompositeImplicitAutograd.CompositeImplicitAutograd operators do not "
                "need an autograd formula; instead, the operator will decompose into its "
                "constituents and those can have autograd formulas defined on them."
            )
        for key in ("Autograd", "AutogradCPU", "AutogradCUDA", "AutogradPrivateUse1"):
            if has(key):
                raise RuntimeError(
                    f"impl_backward/impl_save_for_backward: the operator {self.qualname} already "
                    f"has an Autograd kernel registered to DispatchKey::{key} via a pre-existing "
                    "torch.library or TORCH_LIBRARY registration. Please either remove those "
                    "registrations or don't use the torch._custom_ops APIs"
                )


OPERATORS: dict[str, CustomOp] = {}


def define_operator(namespace: str, name: str, schema: str) -> None:
    from torchgen.model import FunctionSchema

    parsed = FunctionSchema.parse(f"{name}{schema}")
    validate_schema(parsed)
    library = Library(namespace, "FRAGMENT")
    library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    operator = CustomOp(f"{namespace}::{name}", parsed, library)
    operator.stand_in_for_formula()
    set_report_error_callback(
        find_schema(operator.qualname, ""),
        functools.partial(_report_missing_kernel, repr(operator)),
    )
    OPERATORS[operator.qualname] = operator


def find_operator(qualname: str, *, of_others_too: bool = False) -> CustomOp:
    """Return an operator of this module, or another one that is extended for the first time."""
    parse(qualname)
    if qualname in OPERATORS:
        return OPERATORS[qualname]
    if not of_others_too:
        raise RuntimeError(
            f'Could not find custom op "{qualname}". Did you register it via the '
            "torch._custom_ops API?"
        )
    from torchgen.model import FunctionSchema

    schema = str(find_overload(qualname)._schema).rpartition("::")[2]
    library = Library(qualname.partition("::")[0], "FRAGMENT")
    OPERATORS[qualname] = CustomOp(qualname, FunctionSchema.parse(schema), library)
    return OPERATORS[qualname]


def find_overload(qualname: str) -> OpOverload:
    """Return any operator; functions that extend one call this before they return a decorator."""
    namespace, name = parse(qualname)
    packet = getattr(getattr(torch.ops, namespace), name, None)
    if not hasattr(packet, "default"):
        raise ValueError(
            f"Could not find the operator {qualname}. Please make sure you have already registered "
            "the operator and (if registered from C++) loaded it via torch.ops.load_library."
        )
    return packet.default  # type: ignore[union-attr]


def _has_kernel(qualname: str, key: str) -> bool:
    if key != "PrivateUse1":
        return has_computed_kernel_for_key(qualname, key)
    # For PrivateUse1, foo's fallback would count as a kernel of every operator.
    keys = (key, "CompositeImplicitAutograd", "CompositeExplicitAutograd")
    return any(has_kernel_for_key(qualname, key) for key in keys)


def _report_missing_kernel(operator: str, key: str) -> NoReturn:
    """Raise the error of a call without a kernel."""
    if key == "Undefined":
        raise NotImplementedError(
            f"{operator}: There were no Tensor inputs to this operator (e.g. you passed an empty "
            "list of Tensors). If your operator is a factory function (that is, it takes no "
            "Tensors and constructs a new one), then please use CustomOp.impl_factory to register "
            "an implementation for it"
        )
    if key == "Meta":
        raise NotImplementedError(
            f"{operator}: when running with device='Meta' tensors: there is no abstract impl "
            "registered for this CustomOp. Please register one via CustomOp.impl_abstract to get "
            "this CustomOp to work with Meta tensors"
        )
    if key in DISPATCH_KEYS.values():
        device = {key: device for device, key in DISPATCH_KEYS.items()}[key]
        raise NotImplementedError(
            f"{operator}: when running with device='{device}' tensors: there is no {device} impl "
            "registered for this CustomOp. Please register one via "
            f"CustomOp.impl(device_type='{device}')"
        )
    raise NotImplementedError(
        f"{operator}: No implementation for dispatch key {key}. It is likely that we have not "
        "added this functionality yet, please either open an issue or if you're feeling "
        "adventurous, use the low-level torch.library API"
    )
