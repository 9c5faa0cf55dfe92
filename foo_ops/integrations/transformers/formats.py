"""Formats of files with linear layers of 4 and 8 bits: AWQ, GPTQ, compressed-tensors and FP8.

Each reads a layer's tensors into the layout of foo's kernels without rounding, and writes them
back. Four bits are a nibble; files have eight of them in an int32, the first one lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from foo_ops.integrations.transformers.packed import FooPackedLinear, Integers
from foo_ops.integrations.transformers.repacking import pack_columns, pack_rows
from foo_ops.library.operators import dtype_name
from foo_ops.ops.arguments import compute_type
from foo_ops.ops.dequantize import unpack_integers
from foo_ops.ops.linear_quantized import GROUP_SIZES

Stored = Mapping[str, Tensor]
"""A layer's tensors in a file, by the last part of their names."""

# ----------------------------------------------------------------------------------------- nibbles


PER_WORD = 8


def nibbles(words: Tensor) -> Tensor:
    """Unpack (..., M) int32 into (..., 8 M) uint8."""
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)


def words_of(numbers: Tensor) -> Tensor:
    """Pack (..., 8 M) uint8, each less than 16, into (..., M) int32."""
    lower, upper = numbers.unflatten(-1, (-1, 2)).unbind(-1)
    return (lower | upper << 4).contiguous().view(torch.int32)


ROWS = 256
"""Rows that are repacked at a time, so that temporary memory is small and in the caches."""


def in_blocks(rows: int, width: int, repack: Callable[[slice, Tensor], Any], like: Tensor) -> Any:
    """Make a matrix of bytes, of which ``repack`` writes some rows at a time."""
    found = like.new_empty((rows, width), dtype=torch.uint8)
    for first in range(0, rows, ROWS):
        some = slice(first, min(first + ROWS, rows))
        repack(some, found[some])
    return found


def group_size_of(stored: int) -> int | None:
    """Return the kernels' group size for groups of a file, which are then repeated."""
    return next((it for it in reversed(GROUP_SIZES) if stored % it == 0), None)


def repeated(tensor: Tensor, times: int) -> Tensor:
    """Repeat the numbers of each group for the kernels' smaller groups."""
    return tensor.contiguous() if times == 1 else tensor.repeat_interleave(times, 1)


# ----------------------------------------------------------------------------------------- formats


class UnreadableError(Exception):
    """A layer of a file that no kernel of ours multiplies; its text says why."""


def require(condition: bool, reason: str) -> None:
    if not condition:
        raise UnreadableError(reason)


def require_layout(stored: Stored, name: str, dtype: torch.dtype | None, *shape: int) -> None:
    """Refuse a tensor of another dtype or shape; ``None`` is any floating dtype."""
    require(name in stored, f"{name} is missing")
    found = stored[name]
    fits = found.is_floating_point() if dtype is None else found.dtype == dtype
    expected = "floating" if dtype is None else dtype_name(dtype)
    require(
        fits and tuple(found.shape) == shape,
        f"{name} must be {expected} {shape}, got {dtype_name(found.dtype)} {tuple(found.shape)}",
    )


class Format:
    """The layout of one linear layer in a file.

    Attributes:
        method: the name that a model's configuration has for it.
    """

    method: ClassVar[str]

    @classmethod
    def require_files(cls, files: Sequence[str]) -> None:
        """Refuse files that cannot be read at all."""

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        """Whether a layer's tensors have this format."""
        raise NotImplementedError

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        """Return the format of a layer (N, K), from the shapes of its tensors.

        Raises:
            UnreadableError: if no kernel of ours multiplies it.
        """
        raise NotImplementedError

    def completed(self, stored: Stored) -> Format:
        """Return the format with what only the loaded numbers of a layer's tensors say."""
        return self

    def for_experts(self) -> Format:
        """Return the format as a layer of experts is read, whose kernels know fewer layouts."""
        return self

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        raise NotImplementedError

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        raise NotImplementedError


def groups_in(stored: Stored, name: str, dim: int, columns: int) -> int:
    """Return the size of a file's groups, from the number of scales along a dimension."""
    require(name in stored, f"{name} is missing")
    scales = stored[name]
    groups = scales.shape[dim] if scales.dim() == 2 else 0
    require(
        groups > 0 and columns % groups == 0 and group_size_of(columns // groups) is not None,
        f"{name} must have groups whose size is a multiple of 32, got shape {tuple(scales.shape)} "
        f"for {columns} inputs",
    )
    return columns // groups


@dataclass(frozen=True)
class Awq(Format):
    """AWQ's GEMM format.

    ``qweight`` (K, N / 8) and ``qzeros`` (G, N / 8) have nibbles of adjacent outputs, in the order
    of `ORDER`; ``scales`` are (G, N).

    Attributes:
        group_size: of the file.
    """

    method = "awq"
    ORDER: ClassVar[tuple[int, ...]] = (0, 2, 4, 6, 1, 3, 5, 7)
    """The output of each nibble of a word."""
    group_size: int

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "qweight" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        layout = str(getattr(config.format, "value", config.format))
        require(layout == "gemm", f"its version must be gemm, got {layout}")
        require(config.bits == 4, f"it must have 4 bits, got {config.bits}")
        size = groups_in(stored, "scales", 0, columns)
        require_layout(stored, "qweight", torch.int32, columns, rows // PER_WORD)
        require_layout(stored, "scales", None, columns // size, rows)
        require_layout(stored, "qzeros", torch.int32, columns // size, rows // PER_WORD)
        return cls(size)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        size: Any = group_size_of(self.group_size)
        scales, weight = stored["scales"], pack_columns(stored["qweight"], size)
        zeros = nibbles(stored["qzeros"]).unflatten(1, (-1, PER_WORD))
        order = torch.tensor(self.ORDER, device=zeros.device).argsort()
        times = self.group_size // size
        zero = repeated(zeros[..., order].flatten(1).t().to(dtype), times)
        return Integers(weight, repeated(scales.t().to(dtype), times), zero)

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        integers, scale, zero = in_groups_of(layer, self.group_size)
        order = torch.tensor(self.ORDER, device=scale.device)

        def packed(numbers: Tensor) -> Tensor:
            return words_of(numbers.t().unflatten(1, (-1, PER_WORD))[..., order].flatten(1))

        return {
            "qweight": packed(integers),
            "qzeros": packed(zero),
            "scales": scale.t().contiguous(),
        }


def in_groups_of(layer: FooPackedLinear, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the integers (N, K), scales and zeros of a layer with 4 bits, in a file's groups."""
    times = group_size // layer.group_size  # type: ignore[operator]
    integers = unpack_integers(layer.weight, layer.scale.shape[1]).flatten(1)
    zero: Any = layer.zero
    require(
        torch.equal(zero, zero.round()),
        "its zeros must be integers, and those of method='hqq' are not",
    )
    return integers, layer.scale[:, ::times], zero[:, ::times].to(torch.uint8)


@dataclass(frozen=True)
class Gptq(Format):
    """GPTQ's formats ``gptq`` and ``gptq_v2``.

    With 4 bits, ``qweight`` (K / 8, N) has nibbles of adjacent inputs, ``qzeros`` (G, N / 8) of
    adjacent outputs, in their order; ``scales`` are (G, N). With 8 bits there are bytes in place of
    nibbles. ``g_idx`` (K,) has the group of each input, which act-order permutes.

    Attributes:
        bits: 4 or 8.
        group_size: of the file.
        offset: zeros are stored less this.
        has_index: whether the file has ``g_idx``.
    """

    method = "gptq"
    bits: int
    group_size: int
    offset: int
    has_index: bool

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "qweight" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        offsets = {"gptq": 1, "gptq_v2": 0}
        require(
            config.format in offsets,
            f"its checkpoint_format must be gptq or gptq_v2, got {config.format}",
        )
        require(config.bits in (4, 8), f"it must have 4 or 8 bits, got {config.bits}")
        per_word, has_index = 32 // config.bits, "g_idx" in stored
        size = groups_in(stored, "scales", 0, columns)
        require_layout(stored, "qweight", torch.int32, columns // per_word, rows)
        require_layout(stored, "scales", None, columns // size, rows)
        require_layout(stored, "qzeros", torch.int32, columns // size, rows // per_word)
        if has_index:
            require_layout(stored, "g_idx", torch.int32, columns)
        return cls(config.bits, size, offsets[config.format], has_index)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        words, scale = stored["qweight"].t(), stored["scales"].t().to(dtype)
        order = order_of(stored.get("g_idx"), self.group_size)
        if self.bits == 8:
            zeros = stored["qzeros"].contiguous().view(torch.uint8)
            require(bool((zeros + self.offset == SIGN).all()), "qzeros must be 128 with 8 bits")
            return grouped_bytes(signed(words), scale, order)
        zero = (nibbles(stored["qzeros"]) + self.offset & 15).t().to(dtype)
        return grouped(words, scale, zero, order, self.group_size)

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        rows, columns = layer.out_features, layer.in_features
        if self.bits == 8:
            words = words_of_signed(in_own_order(layer.weight, layer.order))
            scale = scales_of_bytes(layer, self.group_size)
            sizes = (scale.shape[1], rows)
            zeros = scale.new_full(sizes, SIGN - self.offset, dtype=torch.uint8)
            packed_zeros = zeros.view(torch.int32)
        else:
            integers, scale, zero = in_groups_of(layer, self.group_size)
            words = words_of(in_own_order(integers, layer.order))
            packed_zeros = words_of((zero - self.offset & 15).t())
        tensors = {
            "qweight": words.t().contiguous(),
            "qzeros": packed_zeros,
            "scales": scale.t().contiguous(),
        }
        if self.has_index:
            tensors["g_idx"] = index_of(layer.order, columns, self.group_size, scale.device)
        return tensors


@dataclass(frozen=True)
class CompressedTensors(Format):
    """The formats ``pack-quantized``, ``int-quantized`` and ``float-quantized``.

    ``weight_packed`` (N, K / 8) has nibbles of adjacent inputs, or (N, K / 4) bytes, each more than
    the signed integer by 8 or 128. ``weight_scale`` is (N, G), ``weight_zero_point`` (N / 8, G) has
    nibbles of adjacent outputs, and is missing in symmetric files. Without packing, ``weight`` is
    (N, K) int8 or float8_e4m3fn; the latter may have one scale in all, (1,).

    Attributes:
        bits: 4 or 8.
        group_size: of the file.
        is_packed: whether integers are in words of 32 bits.
        is_symmetric: whether all zeros are that of the signed integers.
        has_index: whether the file has ``weight_g_idx``, the group of each input.
        float_scale: the dtype of scales if weights are float8_e4m3fn, else None.
        has_rows: whether each row has a scale of its own.
    """

    method = "compressed-tensors"
    bits: int
    group_size: int
    is_packed: bool = True
    is_symmetric: bool = False
    has_index: bool = False
    float_scale: torch.dtype | None = None
    has_rows: bool = True

    @property
    def name(self) -> str:
        if self.float_scale is not None:
            return "float-quantized"
        return "pack-quantized" if self.is_packed else "int-quantized"

    @classmethod
    def of(cls, layer: FooPackedLinear) -> CompressedTensors:
        """Return the format that a layer was read from, or else one that writes it exactly.

        It ignores tables: `save_quantized` refuses layers that have one.
        """
        if isinstance(layer.stored_format, cls):
            return layer.stored_format
        size, has_index = layer.group_size or layer.in_features, layer.order is not None
        is_packed = not (layer.is_float or layer.group_size is None)
        float_scale = layer.scale.dtype if layer.is_float else None
        return cls(layer.bits, size, is_packed, layer.zero is None, has_index, float_scale)

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "weight_packed" in stored or "weight_scale" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        for name in ("sparsity_config", "transform_config"):
            require(not config.to_dict().get(name), f"it must have no {name}")
        if is_float8(stored):
            return cls.find_float(stored, rows, columns)
        size = groups_in(stored, "weight_scale", 1, columns)
        require_layout(stored, "weight_scale", None, rows, columns // size)
        is_symmetric, has_index = "weight_zero_point" not in stored, "weight_g_idx" in stored
        bits, is_packed = 8, "weight_packed" in stored
        if is_packed:
            words = stored["weight_packed"].shape[-1]
            bits = 4 if words * PER_WORD == columns else 8
            require_layout(stored, "weight_packed", torch.int32, rows, columns * bits // 32)
        else:
            require_layout(stored, "weight", torch.int8, rows, columns)
        if bits == 8:
            require(is_symmetric, "8 bits must have no weight_zero_point")
        elif not is_symmetric:
            height = -(-rows // PER_WORD)
            require_layout(stored, "weight_zero_point", torch.int32, height, columns // size)
        if has_index:
            require_layout(stored, "weight_g_idx", torch.int32, columns)
        return cls(bits, size, is_packed, is_symmetric, has_index)

    @classmethod
    def find_float(cls, stored: Stored, rows: int, columns: int) -> Format:
        require_layout(stored, "weight", torch.float8_e4m3fn, rows, columns)
        scale = stored["weight_scale"]
        if scale.numel() == 1:
            return cls(8, columns, False, True, float_scale=scale.dtype, has_rows=False)
        size = groups_in(stored, "weight_scale", 1, columns)
        require_layout(stored, "weight_scale", None, rows, columns // size)
        return cls(8, size, False, True, float_scale=scale.dtype)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        if self.float_scale is not None:
            scale = stored["weight_scale"].to(compute_type(dtype))
            if not self.has_rows:
                scale = scale.reshape(1, 1).repeat(len(stored["weight"]), 1)
            return grouped_bytes(stored["weight"].view(torch.uint8), scale, None)
        scale = stored["weight_scale"].to(dtype)
        if self.bits == 8:
            weight = signed(stored["weight_packed"]) if self.is_packed else stored["weight"]
            order = order_of(stored.get("weight_g_idx"), self.group_size)
            return grouped_bytes(weight, scale, order)
        if self.is_symmetric:
            zero = torch.full_like(scale, 8)
        else:
            zero = nibbles(stored["weight_zero_point"].t())[:, : len(scale)].t().to(dtype)
        order = order_of(stored.get("weight_g_idx"), self.group_size)
        return grouped(stored["weight_packed"], scale, zero, order, self.group_size)

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        scale: Any
        if self.bits == 8:
            scale = scales_of_bytes(layer, self.group_size)
            weight = in_own_order(layer.weight, layer.order)
            if not self.is_packed:
                if self.float_scale is not None:
                    weight = weight.view(torch.float8_e4m3fn)
                    scale = (scale if self.has_rows else scale[0]).to(self.float_scale)
                return {"weight": weight, "weight_scale": scale.contiguous()}
            words = words_of_signed(weight)
        else:
            integers, scale, zero = in_groups_of(layer, self.group_size)
            words = words_of(in_own_order(integers, layer.order))
        rows, columns = layer.out_features, layer.in_features
        tensors = {
            "weight_packed": words,
            "weight_scale": scale.contiguous(),
            "weight_shape": torch.tensor((rows, columns)),
        }
        if not self.is_symmetric:
            # Rows beyond the last one have the integer 0, as compressed-tensors pads them.
            padded = F.pad(zero.t(), (0, -rows % PER_WORD))
            tensors["weight_zero_point"] = words_of(padded).t().contiguous()
        if self.has_index:
            index = index_of(layer.order, columns, self.group_size, scale.device)
            tensors["weight_g_idx"] = index
        return tensors


@dataclass(frozen=True)
class Fp8(Format):
    """FP8 with blocks, as DeepSeek's and Qwen's files have it.

    ``weight`` is (N, K) float8_e4m3fn, and ``weight_scale_inv`` has a factor for each block of rows
    and columns, or one in all. With ``scale_fmt`` "ue8m0" they may be powers of two in a byte,
    float8_e8m0fnu or uint8 with the same bits.

    Attributes:
        block: the numbers of rows and columns of a block.
        scale_dtype: of the file.
        has_blocks: whether the file has a factor for each block.
    """

    method = "fp8"
    block: tuple[int, int]
    scale_dtype: torch.dtype
    has_blocks: bool

    @classmethod
    def is_in(cls, stored: Stored) -> bool:
        return "weight_scale_inv" in stored

    @classmethod
    def find(cls, stored: Stored, rows: int, columns: int, config: Any) -> Format:
        require_layout(stored, "weight", torch.float8_e4m3fn, rows, columns)
        scale = stored["weight_scale_inv"]
        if config.scale_fmt == "ue8m0" and scale.dtype == torch.uint8:
            stored = {**stored, "weight_scale_inv": scale.view(torch.float8_e8m0fnu)}
        if scale.numel() == 1 and not config.weight_block_size:
            return cls((rows, columns), scale.dtype, has_blocks=False)
        height, width = config.weight_block_size
        sizes = (-(-rows // height), -(-columns // width))
        require_layout(stored, "weight_scale_inv", None, *sizes)
        require(
            cls.size_of_group(width, columns) is not None,
            f"blocks and inputs must be multiples of 32, got {width} and {columns}",
        )
        return cls((height, width), scale.dtype, has_blocks=True)

    @staticmethod
    def size_of_group(width: int, columns: int) -> int | None:
        """Return the largest group that divides a block's columns, and the layer's."""
        sizes = (it for it in reversed(GROUP_SIZES) if width % it == 0 and columns % it == 0)
        return next(sizes, None)

    def read(self, stored: Stored, dtype: torch.dtype) -> Integers:
        weight = stored["weight"].view(torch.uint8)
        rows, columns = weight.shape
        exponents = stored["weight_scale_inv"]
        if self.scale_dtype == torch.uint8:
            exponents = exponents.view(torch.float8_e8m0fnu)
        scale = exponents.to(compute_type(dtype))
        if not self.has_blocks:
            return Integers(weight, scale.reshape(1).repeat(rows))
        height, width = self.block
        size: Any = self.size_of_group(width, columns)
        of_rows = scale.repeat_interleave(height, 0)[:rows]
        of_groups = of_rows.repeat_interleave(width // size, 1)[:, : columns // size]
        return Integers(weight, of_groups.contiguous())

    def write(self, layer: FooPackedLinear) -> dict[str, Tensor]:
        scale = layer.scale[0]
        if self.has_blocks:
            height, width = self.block
            size: Any = layer.group_size
            scale = layer.scale[::height, :: width // size]
        return {
            "weight": layer.weight.view(torch.float8_e4m3fn),
            "weight_scale_inv": self.stored_scale(scale).contiguous(),
        }

    def stored_scale(self, scale: Tensor) -> Tensor:
        if self.scale_dtype == torch.uint8:
            return scale.to(torch.float8_e8m0fnu).view(torch.uint8)
        return scale.to(self.scale_dtype)


def is_float8(stored: Stored) -> bool:
    return "weight" in stored and stored["weight"].dtype == torch.float8_e4m3fn


# --------------------------------------------------------- what GPTQ and compressed-tensors share


SIGN = 128
"""Added to signed integers of 8 bits."""


def signed(words: Tensor) -> Tensor:
    """Unpack (N, K / 4) int32 into (N, K) int8."""

    def repack(rows: slice, bytes: Tensor) -> None:
        torch.bitwise_xor(words[rows].contiguous().view(torch.uint8), SIGN, out=bytes)

    integers: Tensor = in_blocks(len(words), 4 * words.shape[1], repack, words)
    return integers.view(torch.int8)


def words_of_signed(integers: Tensor) -> Tensor:
    """Pack (N, K) int8 into (N, K / 4) int32."""
    return (integers.contiguous().view(torch.uint8) ^ SIGN).view(torch.int32)


def grouped_bytes(weight: Tensor, scale: Tensor, order: Tensor | None) -> Integers:
    """Return weights of 8 bits (N, K), whose scales (N, G) are of groups or of whole rows."""
    columns, groups = weight.shape[1], scale.shape[1]
    if groups == 1:
        return Integers(weight, scale.flatten())
    size: Any = group_size_of(columns // groups)
    scale = repeated(scale, columns // groups // size)
    return Integers(weight if order is None else weight[:, order], scale, None, order)


def scales_of_bytes(layer: FooPackedLinear, group_size: int) -> Tensor:
    """Return the scales of a layer with 8 bits, in a file's groups."""
    if layer.group_size is None:
        return layer.scale.unsqueeze(1)
    return layer.scale[:, :: group_size // layer.group_size]


def grouped(
    words: Tensor, scale: Tensor, zero: Tensor, order: Tensor | None, group_size: int
) -> Integers:
    """Return the weights of (N, K / 8) int32, scales and zeros (N, G)."""
    size: Any = group_size_of(group_size)
    weight = pack_rows(words, size, order)
    scale, zero = (repeated(it, group_size // size) for it in (scale, zero))
    return Integers(weight, scale, zero, order)


def order_of(index: Tensor | None, group_size: int) -> Tensor | None:
    """Return the inputs by groups, or None if adjacent ones are of one group already."""
    if index is None:
        return None
    in_order = torch.arange(len(index), device=index.device) // group_size
    if torch.equal(index, in_order.to(index.dtype)):
        return None
    order = index.argsort(stable=True)
    require(
        torch.equal(index[order], in_order.to(index.dtype)),
        f"its inputs must be in groups of {group_size}",
    )
    return order


def index_of(order: Tensor | None, columns: int, group_size: int, device: torch.device) -> Tensor:
    """Return the group of each input."""
    in_order = torch.arange(columns, device=device) // group_size
    return in_own_order(in_order, order).to(torch.int32)


def in_own_order(columns: Tensor, order: Tensor | None) -> Tensor:
    """Undo ``columns[..., order]``."""
    return columns if order is None else columns[..., order.argsort()]
