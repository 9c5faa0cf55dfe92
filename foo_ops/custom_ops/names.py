"""Check the names and schemas of operators."""

from __future__ import annotations

from typing import Any

from foo_ops.library import operators

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
