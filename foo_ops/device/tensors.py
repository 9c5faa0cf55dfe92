"""Legacy classes of tensors for one dtype, and metadata that a tensor carries."""

import types
from typing import Any

import torch

from foo_ops._C import device as _C
from foo_ops.compat import LegacyStorage

# ----------------------------------------------------------------------------------- legacy classes

# torch deprecates them. ``tensor.type()`` returns their names.


DTYPES = {
    "BFloat16": torch.bfloat16,
    "Bool": torch.bool,
    "Byte": torch.uint8,
    "Char": torch.int8,
    "Double": torch.float64,
    "Float": torch.float32,
    "Half": torch.float16,
    "Int": torch.int32,
    "Long": torch.int64,
    "Short": torch.int16,
}
# torch has legacy storages of complex numbers, but no such tensors.
STORAGE_DTYPES = DTYPES | {"ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64}


class TensorType(type):
    """Metaclass of these classes, whose instances are tensors of foo with one dtype."""

    dtype: torch.dtype

    # Tensor.type reads the class's C-level name, which must include the module.
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        return cls.__qualname__

    def __instancecheck__(cls, instance: Any) -> bool:
        return (
            isinstance(instance, torch.Tensor)
            and instance.device.type == "foo"
            and (instance.dtype == cls.dtype and instance.layout == torch.strided)
        )

    def __call__(cls, *arguments: Any, device: Any = "foo") -> torch.Tensor:
        """Make a tensor from sizes, from numbers, or sharing another tensor's memory."""
        device = torch.device(device)
        if device.type != "foo":
            raise RuntimeError(
                f"legacy constructor expects device type: foo but device type: "
                f"{device.type} was passed"
            )
        if len(arguments) == 1 and not isinstance(arguments[0], int):
            (value,) = arguments
            if isinstance(value, torch.Tensor):
                if not isinstance(value, cls):
                    raise TypeError(f"expected {cls.__name__} (got {value.type()})")
                return torch.ops.aten.alias(value)
            if isinstance(value, torch.Size):
                return torch.empty(value, dtype=cls.dtype, device=device)
            return torch.tensor(value, dtype=cls.dtype, device=device)
        return torch.empty(arguments or (0,), dtype=cls.dtype, device=device)


def _storage_class(name: str, dtype: torch.dtype) -> type:
    # torch reads the device from the name of the module.
    members = {"dtype": dtype, "_dtype": dtype, "__module__": "torch.foo"}
    return types.new_class(name, (LegacyStorage,), exec_body=lambda body: body.update(members))


def _tensor_class(name: str, dtype: torch.dtype) -> type:
    members = {"dtype": dtype, "__module__": "torch.foo", "__qualname__": name}
    return TensorType(f"torch.foo.{name}", (), members)


CLASSES: dict[str, type] = {
    **{f"{name}Tensor": _tensor_class(f"{name}Tensor", dtype) for name, dtype in DTYPES.items()},
    **{
        f"{name}Storage": _storage_class(f"{name}Storage", dtype)
        for name, dtype in STORAGE_DTYPES.items()
    },
}


# ----------------------------------------------------------------------------------------- metadata


def set_backend_meta(tensor: torch.Tensor, version: int, format_number: int) -> None:
    """Mark the memory of a tensor on foo with a version and the number of a format.

    The mark belongs to the memory: every view has it, and so do tensors that ``.to``, ``clone``,
    ``copy.deepcopy`` and ``torch.load`` make from it. Results of other operators do not.
    ``ValueError`` for a tensor that is not a dense one on foo.

    >>> tensor = torch.ones(3, device="foo")
    >>> torch.foo.set_backend_meta(tensor, 1, 29)
    >>> torch.foo.get_backend_meta(tensor.to("foo:1"))
    (1, 29)
    """
    _C.set_backend_meta(tensor, version, format_number)


def get_backend_meta(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the version and number set by :func:`set_backend_meta`, or None.

    Example:
        >>> torch.foo.get_backend_meta(torch.ones(3, device="foo")) is None
        True
    """
    return _C.get_backend_meta(tensor)
