"""Count the floating-point operations of an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from foo_ops._process import after_import
from foo_ops.compat import OpOverload
from foo_ops.kernels.compiler.inspection import count_operations
from foo_ops.library.operators import find, tensors_in


def register_flops(
    *names: str, takes_tensors: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the function that computes the floating-point operations of these operators.

    The function takes the operator's arguments, with shapes in place of tensors unless
    ``takes_tensors`` is set. It serves torch.utils.flop_counter.FlopCounterMode, and replaces an
    earlier one. An elementwise operator needs none: for each element of the result, the operations
    and calls in its function are counted. torch's operators count as nothing, except products and
    convolutions.

    Example:
        >>> from torch.utils.flop_counter import FlopCounterMode
        >>> @foo_ops.library.numba_op("mylib::multiply_add")
        ... def multiply_add(x: float, y: float) -> float:
        ...     return x * y + 1.0
        >>> @foo_ops.library.register_flops("mylib::multiply_add")
        ... def count(x_shape, y_shape, **keywords):
        ...     return 2 * torch.Size(x_shape).numel()
        >>> with FlopCounterMode(display=False) as counter:
        ...     result = torch.ops.mylib.multiply_add(torch.ones(4, 8), torch.ones(4, 8))
        >>> counter.get_total_flops()
        64
    """
    packets = [find(name)._overloadpacket for name in names]

    def register(formula: Callable[..., int]) -> Callable[..., int]:
        def add() -> None:
            from torch.utils.flop_counter import flop_registry, register_flop_formula

            for packet in packets:
                # A packet may be there twice: its hash changes with each overload that is defined.
                while packet in flop_registry:
                    del flop_registry[packet]
            register_flop_formula(packets, get_raw=takes_tensors)(formula)

        _with_counter(add)
        return formula

    return register


@dataclasses.dataclass(frozen=True)
class _ElementwiseFlops:
    function: Callable[..., Any]

    def __call__(self, *arguments: Any, out_val: Any = None, **keywords: Any) -> int:
        """Count the operations of a call; if it returns nothing, it writes to an argument."""
        results = [tensor.numel() for tensor in tensors_in(out_val)]
        elements = results or [tensor.numel() for tensor in tensors_in((arguments, keywords))]
        return max(elements) * count_operations(self.function)


def count_elementwise(operator: OpOverload, function: Callable[..., Any]) -> None:
    """Count a function's operations for each element, unless `register_flops` gave a formula."""

    def add() -> None:
        from torch.utils.flop_counter import flop_registry

        packet = operator._overloadpacket
        if isinstance(flop_registry.get(packet), (_ElementwiseFlops, type(None))):
            flop_registry[packet] = _ElementwiseFlops(function)

    _with_counter(add)


def _with_counter(add: Callable[[], None]) -> None:
    # Its import takes a tenth of a second where Triton is installed.
    after_import("torch.utils.flop_counter", add)
