"""Weights of 8 and 4 bits in the linear layers and experts of a model that decodes."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.pytorch_utils import Conv1D

from foo_ops._C import holds_sample, sum_of_bits
from foo_ops.compat import disable_current_modes, is_functorch_wrapped_tensor, len_dispatch_stack
from foo_ops.integrations.transformers.experts import (
    FooExperts,
    gate_of,
    is_served,
    names_of_weights,
    weights_of,
)
from foo_ops.integrations.transformers.linear import FooConv1D, FooLinear
from foo_ops.integrations.transformers.memory import trim
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    can_multiply,
    has_hooks,
    has_numbers,
    is_replaced,
    put_back,
    replace,
)
from foo_ops.library.operators import is_known
from foo_ops.ops.experts.mixture import moe_experts
from foo_ops.ops.experts.quantized import dequantized, moe_experts_quantized
from foo_ops.ops.linear import any_requires_grad
from foo_ops.ops.linear_quantized import grad_of_weight, quantize_weight
from foo_ops.ops.linear_silu_mul_quantized import linear_silu_mul_quantized
from foo_ops.ops.silu_mul import silu_mul

# -------------------------------------------------------------------------------- sources of copies

# Checks in about two microseconds that a weight is unchanged since its quantised copy was made.


SMALL = 2**10
"""Weights with at most this many elements are compared as a whole."""
SAMPLES = 256
PARTS = 16
"""Parts of a weight that are compared in turns."""
LEAST_OF_PART = 2**15
"""Elements of a part."""
FEWER_SAMPLES = 8
"""If some parts are compared, so is one of so many elements of the sample, others in each call.
Each is a page of its own, which a processor has to look up: with all of them, a prompt of 768 takes
1.09 times as long on two threads of an Intel."""


class Numbers(NamedTuple):
    """A fingerprint of a weight's values.

    Attributes:
        sample: some of its elements.
        totals: the sum of all bits of each part, in the order of memory.
    """

    sample: Tensor
    totals: list[int]

    @classmethod
    def of(cls, weight: Tensor) -> Numbers:
        with torch.inference_mode(False), torch.no_grad():
            memory = readable(weight)
            totals = [sum_of_bits(memory, *part) for part in parts_of(weight)]
            return cls(sample_of(weight).clone(), totals)

    def may_be_of(self, weight: Tensor) -> bool:
        """Whether the weight has this sample; it may have moved to another device."""
        if weight.dtype != self.sample.dtype:
            return False
        return torch.equal(sample_of(weight), self.sample.to(weight.device))

    def to(self, device: torch.device) -> Numbers:
        return Numbers(self.sample.to(device), self.totals)


def sample_of(weight: Tensor) -> Tensor:
    return weight.detach().as_strided(*sampled(weight))


def sampled(weight: Tensor) -> Any:
    """Return sizes, strides and offset of a sample spread over a matrix.

    It has an element of each row if there are at most `SAMPLES` rows, and ends with the matrix's
    last element, so that appended rows (new tokens) are noticed.
    """
    (rows, columns), (row, column) = weight.shape, weight.stride()
    if weight.numel() <= SMALL and is_dense(weight):
        return (weight.numel(),), (1,), weight.storage_offset()
    if weight.numel() <= SMALL:
        return weight.shape, weight.stride(), weight.storage_offset()
    if is_dense(weight):
        width = max(row, column)
        step = weight.numel() // SAMPLES
        # Without a common divisor, successive rows are sampled in different columns.
        while math.gcd(step, width) > 1:
            step -= 1
        count = (weight.numel() - 1) // step + 1
    else:
        count = min(SAMPLES, max(rows, columns))
        step = rows // count * row + columns // count * column
    last = weight.storage_offset() + (rows - 1) * row + (columns - 1) * column
    return (count,), (step,), last - (count - 1) * step


def is_dense(weight: Tensor) -> bool:
    """Whether a matrix's memory has no gaps."""
    return weight.is_contiguous() or weight.t().is_contiguous()


def readable(weight: Tensor) -> Tensor:
    """Return a weight whose memory a CPU can read, and has no gaps: itself or a copy."""
    if weight.is_cpu and is_dense(weight):
        return weight
    memory = weight.detach().cpu()
    return memory if is_dense(memory) else memory.contiguous()


def parts_of(weight: Tensor) -> list[tuple[int, int]]:
    """Return the first element and the number of elements of up to `PARTS` parts."""
    count = weight.numel()
    size = max(LEAST_OF_PART, -(-count // PARTS))
    return [(first, min(size, count - first)) for first in range(0, count, size)]


def note_of(weight: Tensor) -> Tensor:
    version = -1 if weight.is_inference() else weight._version
    with torch.inference_mode(False):
        return torch.tensor((weight.untyped_storage()._cdata, weight.data_ptr(), version))


class Source:
    """A weight as it was when its quantised copy was made.

    Autograd's version counter shows writes to a tensor, and a tensor that replaces it has another
    address. Nothing counts writes through ``.data``, by which adapters are merged
    (``weight.data += delta``): the sample shows them if most elements change, also if they change
    places, and the totals if any has other bits.
    """

    def __init__(self, weight: Tensor, numbers: Numbers, is_current: bool = True) -> None:
        """Note a weight.

        Args:
            numbers: fingerprint of its present or former values.
            is_current: whether the copy was made from these values.
        """
        storage = weight.untyped_storage()
        # While a reference to the storage exists, no other storage has its address.
        self.storage = StorageWeakRef(storage)
        self.address: int = storage._cdata if is_current else 0
        self.place = weight.data_ptr()
        self.version = None if weight.is_inference() else weight._version
        self.layout = weight.shape, weight.stride(), weight.dtype
        self.sampled = sampled(weight)
        self.numbers = numbers
        (*_, step), first = self.sampled[1:]
        self.first, self.step = first - weight.storage_offset(), step
        # Tensors with gaps, or on other devices, are read by operators.
        self.is_readable = weight.is_cpu and is_dense(weight)
        self.parts = parts_of(weight)
        self.next_part = self.turn = 0
        self.note = note_of(weight)
        """Address, place and version in a tensor, for compiled graphs."""
        if not is_current:
            self.note.zero_()

    @classmethod
    def of(cls, weight: Tensor) -> Source:
        return cls(weight, Numbers.of(weight))

    def holds(self, weight: Tensor, parts: int = 0) -> bool:
        """Whether this is the noted weight, with the same version and numbers.

        Args:
            weight: a matrix.
            parts: how many parts are compared; if not all, so is a part of the sample.
        """
        return (
            weight.untyped_storage()._cdata == self.address
            and weight.data_ptr() == self.place
            and (self.version is None or weight._version == self.version)
            and (weight.shape, weight.stride(), weight.dtype) == self.layout
            and self.holds_sample(weight, parts)
            and (parts == 0 or self.holds_parts(weight, parts))
        )

    def holds_sample(self, weight: Tensor, parts: int) -> bool:
        sample = self.numbers.sample
        if not self.is_readable:
            return torch.equal(weight.as_strided(*self.sampled), sample)
        begin, every = 0, 1
        if 0 < parts < len(self.parts):
            begin = self.turn = (self.turn + 1) % FEWER_SAMPLES
            every = FEWER_SAMPLES
        return holds_sample(weight, self.first, self.step, sample, begin, every)

    def holds_parts(self, weight: Tensor, count: int) -> bool:
        """Check the totals of this many parts, from the next one on.

        It stays at a part that has changed, until a copy is made of the weight.
        """
        memory = weight if self.is_readable else readable(weight)
        parts, totals = self.parts, self.numbers.totals
        for _ in range(min(count, len(parts))):
            part = self.next_part % len(parts)
            if sum_of_bits(memory, *parts[part]) != totals[part]:
                return False
            self.next_part = part + 1
        return True


# ------------------------------------------------------------------------------------------- layers


BITS = (8, 4)
GROUP_SIZES = (64, 32)
"""For 4 bits, in the order in which they are tried: weights per scale and zero."""
MANY_ROWS, ROWS_FOR_ALL = 256, 8192
"""From how many rows on a product reads a part of the weight itself, and from how many on all of
it: a few percent of the time. All of it takes 16 percent for 768 rows of bytes on a matrix unit.
From MANY_ROWS on it also rounds by section, and is computed together with its gate."""

lock = threading.RLock()
"""Held while copies are renewed, so that no other thread reads a half-written one."""


class Copy(NamedTuple):
    """The names of a module's weight and of what belongs to its quantised copy.

    Attributes:
        weight: the parameter.
        buffers: integers, scale and zero, which is None for 8 bits.
        source: the attribute with the `Source`.
    """

    weight: str
    buffers: tuple[str, str, str]
    source: str


OF_LAYER = Copy("weight", ("foo_weight", "foo_scale", "foo_zero"), "_foo_source")
OF_EXPERTS = {
    name: Copy(
        name, (f"foo_{name}", f"foo_{name}_scale", f"foo_{name}_zero"), f"_foo_source_{name}"
    )
    for name in ("gate_up_proj", "up_proj", "down_proj")
}


class Quantized(Replacement):
    """Base class of replacements that keep copies of weights in 8 or 4 bits.

    A copy is in non-persistent buffers, which move with the module. Each call checks that the
    weight is still the one that was copied, and renews the copy otherwise. In training the weight
    itself is used.
    """

    training: bool
    _buffers: Any
    _parameters: Any

    @classmethod
    def copies(cls, module: nn.Module) -> tuple[Copy, ...]:
        """Return the copies that a module has."""
        raise NotImplementedError

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        for copy in cls.copies(module):
            for name in copy.buffers:
                delattr(module, name)
            vars(module).pop(copy.source, None)

    def train(self, mode: bool = True) -> Any:
        """Check all of the weights before evaluation, also for compiled graphs."""
        made = super().train(mode)  # type: ignore[misc]
        if not mode:
            self.renew(PARTS)
        return made

    def renew(self, parts: int = 0) -> None:
        for copy in self.copies(self):  # type: ignore[arg-type]
            renew(self, copy, parts)

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*arguments, **keywords)  # type: ignore[misc]
        if not self.training:
            self.renew()

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Keep copies that move with their weights; renew those whose weights are converted."""
        copies = self.copies(self)  # type: ignore[arg-type]
        numbers = [current_numbers(self, copy) for copy in copies]
        made = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        for copy, of_weight in zip(copies, numbers):
            take_over(self, copy, of_weight)
        return made

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Clone the buffers, which may be parts of larger tensors (`FooJoined`)."""
        copies = self.copies(self)  # type: ignore[arg-type]
        names = [name for copy in copies for name in copy.buffers]
        own = {name: it.clone() for name in names if (it := self._buffers[name]) is not None}
        return {
            **state,
            "_buffers": {**state["_buffers"], **own},
            **{copy.source: current_numbers(self, copy) for copy in copies},
        }

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        for copy in self.copies(self):  # type: ignore[arg-type]
            take_over(self, copy, vars(self).pop(copy.source, None))


class FooQuantizedLinear(Quantized):
    """Replaces linear layers, and keeps a copy of the weight in 8 or 4 bits.

    Attributes:
        foo_activations: bits to which the input is rounded: 8 or None.
        foo_ready: an input and the output for it: see `multiplied_together`.
    """

    foo_activations: int | None = None
    foo_ready: tuple[Tensor, Tensor] | None = None
    bias: Tensor | None
    names_to_join = OF_LAYER.buffers

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return FooLinear.recognises(module) or FooConv1D.recognises(module)

    @classmethod
    def copies(cls, module: nn.Module) -> tuple[Copy, ...]:
        return (OF_LAYER,)

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        super().forget(module)
        vars(module).pop("foo_activations", None)

    def forward(self, input: Tensor) -> Any:
        if (ready := ready_output(self, input)) is not None:
            return ready
        own = self._parameters
        weight = own.get("weight")
        # Attribute lookup is slow, and only needed under a parametrization.
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        if self.training or not is_multiplied(input, weight, bias):
            return super().forward(input)  # type: ignore[misc]
        copies = copy_of_layer(self, weight, input)
        output = quantized_product(input, *copies, bias, self.foo_activations)
        if any_requires_grad(weight):
            output = output + WeightGradient.apply(output, input, turned(self, weight))
        return output

    def joins(self, input: Tensor) -> bool:
        """Whether a call multiplies by the copy and adds the bias, and does nothing else."""
        own: Any = self._parameters
        if type(self).forward is not FooQuantizedLinear.forward or "bias" not in own:
            return False
        weight = own.get("weight")
        if self.training or has_hooks(self) or not is_multiplied(input, weight, own["bias"]):
            return False
        if any_requires_grad(weight):
            return False
        copy_of_layer(self, weight, input)
        return True


def is_multiplied(input: Any, weight: Any, bias: Any) -> bool:
    """Whether a layer's copy may stand for its weight.

    It may not where `torch.func` has wrapped the weight.
    """
    if weight is None or not can_multiply(input, weight, bias):
        return False
    return is_unwrapped(weight)


def quantized_product(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    activations: int | None,
    table: Tensor | None = None,
) -> Tensor:
    """Multiply by weights of 8 bits, or of 4 bits if there are zeros or a table.

    Inputs of float64 are not rounded, nor those for weights of float8_e4m3fn or of a table. Many
    rows are rounded by section.
    """
    if table is not None:
        return torch.ops.foo.linear_table4.default(input, weight, scale, table, bias)
    if zero is None and weight.dtype != torch.int8:
        return torch.ops.foo.linear_fp8.default(input, weight, scale, bias)
    rounding = rounding_of(input, scale, activations)
    if zero is None:
        return torch.ops.foo.linear_int8.default(input, weight, scale, bias, **rounding)
    group_size = 2 * weight.shape[1] // scale.shape[1]
    return torch.ops.foo.linear_int4.default(
        input, weight, scale, zero, bias, group_size=group_size, **rounding
    )


def rounding_of(input: Tensor, scale: Tensor, activations: int | None) -> dict[str, Any]:
    """Return the arguments by which a product with weights of integers rounds its input."""
    if activations is None or input.dtype == torch.float64:
        return {"activations": None}
    by_section = scale.dim() == 2 and has_many_rows(input)
    return {"activations": activations, "by_section": by_section}


def has_many_rows(input: Tensor) -> bool:
    """Whether an input has MANY_ROWS.

    With weights of 4 bits in groups of 64, these take by section 0.53 of the time on a matrix unit,
    and 0.91 on vectors; 64 rows 0.93 and 1.09.

    An exported program for any number of rows cannot know; a compiled one is compiled for both.
    """
    are_many = input.numel() >= MANY_ROWS * input.shape[-1]
    return statically_known_true(are_many) if torch.compiler.is_exporting() else is_known(are_many)


class FooQuantizedExperts(Quantized, FooExperts):
    """Replaces experts, and keeps copies of their weights in 8 or 4 bits."""

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return (
            FooExperts.recognises(module)
            and not module.has_post_expert_norm
            and gate_of(module) is not None
            and all(map(can_be_copied, module._parameters.values()))
        )

    @classmethod
    def copies(cls, module: nn.Module) -> tuple[Copy, ...]:
        return tuple(OF_EXPERTS[name] for name in names_of_weights(module))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        arguments = hidden_states, top_k_index, top_k_weights
        up, down, *biases = weights_of(self)
        is_ours = is_served(hidden_states, top_k_weights, up, down, *biases)
        if self.training or not is_ours or not (is_unwrapped(up) and is_unwrapped(down)):
            return super().forward(*arguments)
        # Each expert multiplies this many rows, on average.
        rows = top_k_index.numel() // up.shape[0]
        copies = [
            current_copy(self, copy, self._parameters[copy.weight], rows)
            for copy in self.copies(self)  # type: ignore[arg-type]
        ]
        options: Any = gate_of(self)
        if any_requires_grad(up, down):
            dense = [
                StraightThrough.apply(it, dequantized(*copy, it.dtype))
                for it, copy in zip((up, down), copies)
            ]
            return moe_experts(*arguments, *dense, *biases, **options)
        return moe_experts_quantized(*arguments, *copies[0], *copies[1], *biases, **options)


def can_be_copied(weight: Tensor | None) -> bool:
    """Whether a parameter's memory has no gaps, or is small as a bias is."""
    return weight is None or weight.dim() < 3 or weight.is_contiguous()


def is_unwrapped(weight: Tensor) -> bool:
    """Whether `torch.func` has not wrapped a weight, to differentiate or map over it."""
    return torch.compiler.is_compiling() or not is_functorch_wrapped_tensor(weight)


QUANTIZED: tuple[type[Quantized], ...] = (FooQuantizedLinear, FooQuantizedExperts)


class StraightThrough(torch.autograd.Function):
    """The numbers of a copy, with the gradient of the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, numbers: Tensor) -> Tensor:
        return numbers.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


class WeightGradient(torch.autograd.Function):
    """Zero whose backward computes the gradient of a product's weight.

    Added to a product with the weight's copy, it changes no value, and gives the weight the
    gradient that it has in the model's own layer (straight through the rounding).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(output: Tensor, input: Tensor, weight: Tensor) -> Tensor:
        return output.new_zeros(()).expand(output.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, input, weight = inputs
        ctx.save_for_backward(input)
        ctx.dtype = weight.dtype

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        return None, None, grad_of_weight(grad_output, input).to(ctx.dtype)


# -------------------------------------------------------------------------------------- the copy


def turned(module: Any, weight: Tensor) -> Tensor:
    """Return a module's weight as (outputs, inputs), or (experts, outputs, inputs)."""
    is_transposed = module.is_transposed if weight.dim() == 3 else isinstance(module, Conv1D)
    return weight.mT if is_transposed else weight


def as_matrix(weight: Tensor) -> Tensor:
    """Return the matrix of all experts' weights, as it lies in memory."""
    if weight.dim() == 2:
        return weight
    return (weight if weight.is_contiguous() else weight.mT).flatten(0, 1)


def copy_of_layer(layer: Any, weight: Tensor, input: Tensor) -> tuple[Any, Any, Any]:
    """Return the current copy of a linear layer's weight, for its input."""
    width = weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1]
    return current_copy(layer, OF_LAYER, weight, input.numel() // max(1, width))


def parts_to_read(rows: int) -> int:
    """Return how many parts of a weight a product of so many rows compares."""
    return 0 if rows < MANY_ROWS else max(1, PARTS * rows // ROWS_FOR_ALL)


def current_copy(module: Any, copy: Copy, weight: Tensor, rows: int) -> tuple[Any, Any, Any]:
    """Return the copy of a module's weight, renewed first if the weight has changed.

    Args:
        rows: how many rows are multiplied by it.
    """
    own = module._buffers
    integers, scale, zero = copy.buffers
    if torch.compiler.is_compiling():
        return own[integers], current_scale(module, copy, turned(module, weight)), own[zero]
    weight, parts = turned(module, weight), parts_to_read(rows)
    source = vars(module).get(copy.source)
    if len_dispatch_stack():
        with disable_current_modes():
            renew(module, copy, parts)
    elif source is None or not source.holds(as_matrix(weight), parts):
        renew(module, copy, parts)
    return own[integers], own[scale], own[zero]


def renew(module: Any, copy: Copy, parts: int = 0) -> None:
    """Renew a copy if the module's weight is no longer the one that was copied.

    Args:
        parts: how many parts of the weight are compared as a whole.
    """
    weight = module._parameters.get(copy.weight)
    if not has_numbers(weight):
        return
    weight = turned(module, weight)
    with lock:
        source = vars(module).get(copy.source)
        if source is None or not source.holds(as_matrix(weight), parts):
            _, scale, zero = (module._buffers[name] for name in copy.buffers)
            group_size = None if zero is None else weight.shape[-1] // scale.shape[-1]
            make_copy(module, copy, weight, group_size)


def make_copy(module: Any, copy: Copy, weight: Tensor, group_size: int | None) -> None:
    """Quantise a weight, as `turned` returns it, into a module's buffers, and note it."""
    # Noted first, so that writes in the meantime are noticed.
    source = Source.of(as_matrix(weight)) if has_numbers(weight) else None
    bits = 8 if group_size is None else 4
    with torch.inference_mode(False), torch.no_grad():
        tensors: Any = quantize_weight(weight.flatten(0, -2), bits, group_size)
        tensors = [it.unflatten(0, weight.shape[:-1]) for it in tensors]
        for name, tensor in zip(copy.buffers, (*tensors, None)):
            write_buffer(module, name, tensor)
    vars(module)[copy.source] = source


# A compiled graph reads tensors only, so there an operator checks the weight. The copy is a memo of
# this operator, which may therefore write to it. It returns the scale so that the product runs
# afterwards.
torch.library.define(
    "foo_transformers::current_scale",
    "(Tensor scale, Tensor copy, Tensor? zero, Tensor weight, Tensor sample, Tensor note) "
    "-> Tensor",
)


@torch.library.impl("foo_transformers::current_scale", "CompositeExplicitAutograd")
def renewed_scale(
    scale: Tensor, copy: Tensor, zero: Tensor | None, weight: Tensor, sample: Tensor, note: Tensor
) -> Tensor:
    with lock:
        now = note_of(weight)
        matrix = as_matrix(weight)
        if not torch.equal(now, note) or not torch.equal(sample_of(matrix), sample):
            bits, size = (8, None) if zero is None else (4, weight.shape[-1] // scale.shape[-1])
            tensors = quantize_weight(weight.flatten(0, -2), bits, size)
            for held, tensor in zip((copy, scale, zero), tensors):
                held.copy_(tensor.view(held.shape))  # type: ignore[union-attr]
            sample.copy_(sample_of(matrix))
            note.copy_(now)
    return scale.clone()


@torch.library.register_fake("foo_transformers::current_scale")
def fake_scale(scale: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(scale)


def current_scale(module: Any, copy: Copy, weight: Tensor) -> Tensor:
    integers, scale, zero = (module._buffers[name] for name in copy.buffers)
    source = getattr(module, copy.source)
    # An exported program keeps the copies as they were.
    if source is None or torch.compiler.is_exporting():
        return scale
    return torch.ops.foo_transformers.current_scale(
        scale, integers, zero, weight.detach(), source.numbers.sample, source.note
    )


def write_buffer(layer: Any, name: str, tensor: Tensor | None) -> None:
    """Write into the existing buffer, which may be part of a larger one (`FooJoined`)."""
    held = layer._buffers.get(name)
    if held is not None and tensor is not None and not held.is_inference():
        alike = [(it.shape, it.dtype, it.device) for it in (held, tensor)]
        if alike[0] == alike[1]:
            held.copy_(tensor)
            return
    layer.register_buffer(name, tensor, persistent=False)


def current_numbers(module: Any, copy: Copy) -> Numbers | None:
    """Return the fingerprint of a module's weight, if its copy is current."""
    weight, source = module._parameters.get(copy.weight), vars(module).get(copy.source)
    if source is None or not has_numbers(weight):
        return None
    if not source.holds(as_matrix(turned(module, weight))):
        return None
    numbers: Numbers | None = source.numbers
    return numbers


def take_over(module: Any, copy: Copy, numbers: Numbers | None) -> None:
    """Note a weight that was copied or moved; its copy is current if numbers match."""
    weight = module._parameters.get(copy.weight)
    vars(module)[copy.source] = None
    if not has_numbers(weight):
        return
    weight = as_matrix(turned(module, weight))
    if numbers is not None and numbers.may_be_of(weight):
        vars(module)[copy.source] = Source(weight, numbers.to(weight.device))
    else:
        vars(module)[copy.source] = Source(weight, Numbers.of(weight), is_current=False)


def check_bits(bits: int | None) -> None:
    if bits is not None and bits not in BITS:
        raise ValueError(f"apply: quantize must be None, 8 or 4, got {bits}")


def check_activations(model: nn.Module, bits: int | None, activations: int | None) -> None:
    if activations not in (None, 8):
        raise ValueError(f"apply: activations must be None or 8, got {activations}")
    if activations is not None and bits is None and not any(map(rounds_input, model.modules())):
        raise ValueError(
            "apply: activations=8 needs quantize=4 or 8, or a model with weights of integers, got "
            "quantize=None"
        )


def rounds_input(module: nn.Module) -> bool:
    """Whether a module has weights of integers, and can round its input for them."""
    return hasattr(module, "foo_activations")


def quantize(module: nn.Module, bits: int) -> None:
    """Quantise the weights of a linear layer or of experts, also after an earlier `apply`.

    With 4 bits, those whose width is no multiple of a group size stay as they are.
    """
    if is_replaced(module) and isinstance(module, (FooLinear, FooConv1D, FooExperts, Quantized)):
        put_back(module)
    kind = next((it for it in QUANTIZED if it.recognises(module)), None)
    if kind is None:
        return
    copies = kind.copies(module)
    weights = [turned(module, module._parameters[it.weight]) for it in copies]  # type: ignore[arg-type]
    sizes = [group_size_of(weight) if bits == 4 else None for weight in weights]
    if bits == 4 and None in sizes:
        return
    for copy, weight, group_size in zip(copies, weights, sizes):
        make_copy(module, copy, weight, group_size)
    replace(module, kind)


def group_size_of(weight: Tensor) -> int | None:
    return next((it for it in GROUP_SIZES if weight.shape[-1] % it == 0), None)


# ----------------------------------------------------------------------- layers with the same input

# Their weights lie together in memory, for one product.


JOINED = "_foo_joined"
"""Attribute of a module whose layers are joined."""


class Joined(NamedTuple):
    """Common tensors of several layers, whose buffers are parts of them.

    Attributes:
        names: of a layer's integers, scale and zero.
        parts: these buffers of each layer.
        tensors: the rows of all layers, in order.
        rows: how many rows each layer has.
        table: that of all layers, if they have one.
    """

    names: tuple[str, str, str]
    parts: Sequence[tuple[Tensor | None, ...]]
    tensors: Sequence[Any]
    rows: list[int]
    table: Tensor | None

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers still have these buffers; a move replaces them."""
        integers, scales, zeros = self.names
        for layer, (weight, scale, zero) in zip(layers, self.parts):
            own = layer._buffers
            if own.get(integers) is not weight or own.get(scales) is not scale:
                return False
            if own.get(zeros) is not zero:
                return False
        return self.table is layers[0]._buffers.get("table")


class FooJoined(Replacement):
    """Base class of modules with layers that share their input.

    Attributes:
        siblings: the names of these layers.
    """

    siblings: ClassVar[tuple[str, ...]]
    _modules: Any

    def join(self) -> None:
        """Make the siblings' buffers parts of common tensors, if their layouts match."""
        layers = [self._modules[name] for name in self.siblings]
        joined = vars(self).get(JOINED)
        if joined is None or not joined.holds(layers):
            vars(self)[JOINED] = joined_buffers(layers)
            if vars(self)[JOINED] is not None:
                # The parts of a large model would wait in memory beside the joined ones.
                trim()

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        vars(module).pop(JOINED, None)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Join the buffers again after a move or conversion, which is done for each by itself."""
        made = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        self.join()
        return made

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: it for name, it in state.items() if name != JOINED}

    def __setstate__(self, state: Any) -> None:
        """Join the buffers of a copy, which are separate (`FooQuantizedLinear`)."""
        super().__setstate__(state)  # type: ignore[misc]
        self.join()


def joined_buffers(layers: Sequence[Any]) -> Joined | None:
    # Both kinds of layers with few bits name their buffers; others have no such attribute.
    found = {getattr(layer, "names_to_join", None) for layer in layers}
    names = found.pop()
    if found or names is None:
        return None
    buffers = [[layer._buffers[name] for name in names] for layer in layers]
    layouts = {tuple(layout_of(it) for it in parts) for parts in buffers}
    table, *tables = [layer._buffers.get("table") for layer in layers]
    if len(layouts) > 1 or not all(is_same(table, it) for it in tables):
        return None
    rows = [len(weight) for weight, _, _ in buffers]
    with torch.inference_mode(False), torch.no_grad():
        tensors: Any = [None if parts[0] is None else rows_of(parts) for parts in zip(*buffers)]
    for name, tensor in zip(names, tensors):
        if tensor is not None:
            for layer, part in zip(layers, tensor.split(rows)):
                layer._buffers[name] = part.detach()
    parts = [tuple(layer._buffers[name] for name in names) for layer in layers]
    return Joined(names, parts, tensors, rows, table)


def rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows; those that are all the same row in memory, as zeros may be, stay one."""
    first = parts[0][:1]
    if all(it.stride(0) == 0 and torch.equal(it[:1], first) for it in parts):
        return first.expand(sum(map(len, parts)), *first.shape[1:])
    return torch.cat(list(parts))


def is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.device == other.device and torch.equal(one, other)


def layout_of(tensor: Tensor | None) -> Any:
    """Return the properties that tensors must share to be concatenated by rows."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


class Operands(NamedTuple):
    """Arguments of `quantized_product` behind the input."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    bias: Tensor | None
    activations: int | None
    table: Tensor | None


def products(module: Any, names: Sequence[str], input: Tensor) -> Sequence[Tensor]:
    """Return the outputs of some layers for one input, by one product if they are joined."""
    outputs = joint_products(module, names, input)
    return [module._modules[name](input) for name in names] if outputs is None else outputs


def joint_products(module: Any, names: Sequence[str], input: Tensor) -> Sequence[Tensor] | None:
    """Return the outputs of joined layers for one input, or None if one product does not do."""
    found = joint_operands(module, names, input)
    if found is None:
        return None
    operands, rows = found
    return quantized_product(input, *operands).split_with_sizes(rows, -1)


def joint_operands(
    module: Any, names: Sequence[str], input: Tensor
) -> tuple[Operands, list[int]] | None:
    """Return what one product multiplies, and the rows of each layer, or None if it does not do."""
    # A compiled graph would depend on the identity of the buffers.
    joined = None if torch.compiler.is_compiling() else vars(module).get(JOINED)
    if joined is None:
        return None
    layers: Any = [module._modules[name] for name in names]
    if not all(joins(layer, input) for layer in layers):
        return None
    biases = [bias for it in layers if (bias := it._parameters["bias"]) is not None]
    if len(biases) not in (0, len(layers)) or not joined.holds(layers):
        return None
    bits = {layer.foo_activations for layer in layers}
    if len(bits) > 1:
        return None
    weight, scale, zero = joined.tensors
    bias = torch.cat(biases) if biases else None
    return Operands(weight, scale, zero, bias, bits.pop(), joined.table), joined.rows


def lone_operands(layer: Any, input: Tensor) -> Operands | None:
    """Return what a layer multiplies its input by, or None if it may do something else, too."""
    names = getattr(layer, "names_to_join", None)
    if torch.compiler.is_compiling() or names is None or not joins(layer, input):
        return None
    own = layer._buffers
    weight, scale, zero = (own[name] for name in names)
    bias, table = layer._parameters["bias"], own.get("table")
    return Operands(weight, scale, zero, bias, layer.foo_activations, table)


def gated_product(input: Tensor, operands: Operands, rows: Sequence[int]) -> Tensor:
    """Return silu(gate) * up, from one weight with the rows of both."""
    if is_gated_at_once(input, operands):
        weight, scale, zero, _, activations, _ = operands
        rounding = rounding_of(input, scale, activations)
        return linear_silu_mul_quantized(input, weight, scale, zero, **rounding)
    return silu_mul(*quantized_product(input, *operands).split_with_sizes(rows, -1))


def is_gated_at_once(input: Tensor, operands: Operands) -> bool:
    """Whether one operator computes the products and their gate.

    Few rows take two steps in that operator, too, and a program of a token runs steps by itself.
    """
    weight, _, zero, bias, activations, table = operands
    are_integers = table is None and (zero is not None or weight.dtype == torch.int8)
    is_rounded = activations is not None and input.dtype != torch.float64
    return are_integers and is_rounded and bias is None and has_many_rows(input)


@contextlib.contextmanager
def multiplied_together(module: Any, names: Sequence[str], input: Tensor) -> Iterator[None]:
    """Let joined layers return parts of one product while a forward calls them with ``input``.

    A layer that another thread's forward has taken computes its output itself.
    """
    outputs = joint_products(module, names, input)
    layers = [] if outputs is None else [module._modules[name] for name in names]
    for layer, output in zip(layers, outputs or ()):
        vars(layer)["foo_ready"] = input, output
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("foo_ready", None)


def ready_output(layer: Any, input: Tensor) -> Tensor | None:
    """Return a layer's output for this input, if `multiplied_together` has computed it."""
    ready = layer.foo_ready
    return ready[1] if ready is not None and ready[0] is input else None


def joins(layer: Any, input: Tensor) -> bool:
    """Whether a product of several layers may include a layer, which others may have wrapped."""
    own = getattr(type(layer), "joins", None)
    return own is not None and own(layer, input)
