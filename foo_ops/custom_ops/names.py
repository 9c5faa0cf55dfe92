"""What names and schemas an operator may have."""

from __future__ import annotations

from typing import Any

# Namespaces of PyTorch itself.
RESERVED_NAMESPACES = {"prim", "prims", "aten", "at", "torch", "pytorch"}


def parse(qualname: str) -> tuple[str, str]:
    namespace, separator, name = qualname.partition("::")
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
    return namespace, name


def validate_namespace(namespace: str) -> None:
    if "." in namespace:
        raise ValueError(
            f'custom_op(..., ns="{namespace}"): expected ns to not contain any . (and be a valid '
            "variable name)"
        )
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
