"""What all functions of flash_attn take, and the checks of their layouts."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from foo_ops.ops.attention.options import given_options

Window = tuple[int, int]
EVERYTHING = (-1, -1)


class Options(NamedTuple):
    """What all functions take.

    Attributes:
        dropout_p: probability that a weight becomes zero.
        softmax_scale: factor of the scores, by default 1 / sqrt(D).
        causal: query i sees the keys up to i + Sk - Sq.
        window_size: (left, right): query i sees the keys from i + Sk - Sq - left to i + Sk - Sq +
            right; -1 stands for no bound.
        softcap: scores become softcap * tanh(score / softcap) where it is above 0.
        alibi_slopes: (H,) or (B, H) float32; -slope * |i + Sk - Sq - j| is added to the scores.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Window = EVERYTHING
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None

    def for_foo(self) -> dict[str, Any]:
        """Return them as foo's operators take them, but for the slopes."""
        left, right = (-1 if bound < 0 else bound for bound in self.window_size)
        return given_options(
            scale=self.softmax_scale,
            dropout_p=self.dropout_p,
            window_left=left,
            window_right=0 if self.causal else right,
            softcap=self.softcap,
        )


def unpacked(
    function: str, name: str, packed: Tensor, layout: tuple[str | int, ...]
) -> tuple[Tensor, ...]:
    """Return the tensors along the dimension whose size the layout gives."""
    place = next(place for place, size in enumerate(layout) if isinstance(size, int))
    if packed.dim() != len(layout) or packed.shape[place] != layout[place]:
        raise ValueError(
            f"{function}: {name} must be ({', '.join(map(str, layout))}), got {tuple(packed.shape)}"
        )
    return packed.unbind(place)


def require_four(function: str, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            raise ValueError(
                f"{function}: {name} must be (batch, seqlen, heads, head_dim), "
                f"got {tuple(tensor.shape)}"
            )
