"""Count the floating-point operations of an operator."""

from __future__ import annotations

from collections.abc import Callable

from foo_ops._after_import import after_import
from foo_ops.library.operators import find


def register_flops(
    *names: str, takes_tensors: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Decorate the function that computes the floating-point operations of these operators.

    It gets the operator's arguments, shapes in place of tensors unless it takes those, and serves
    torch.utils.flop_counter.FlopCounterMode.

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
            from torch.utils.flop_counter import register_flop_formula

            register_flop_formula(packets, get_raw=takes_tensors)(formula)

        # It imports Triton, where that is installed: a tenth of a second.
        after_import("torch.utils.flop_counter", add)
        return formula

    return register
