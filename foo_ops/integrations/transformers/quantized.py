"""foo::linear_int8 and foo::linear_int4 in the linear layers of a model that decodes."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.pytorch_utils import Conv1D

from foo_ops.compat import disable_current_modes, is_functorch_wrapped_tensor, len_dispatch_stack
from foo_ops.integrations.transformers.linear import FooConv1D, FooLinear
from foo_ops.integrations.transformers.replacement import (
    Replacement,
    can_multiply,
    has_hooks,
    has_numbers,
    is_replaced,
    put_back,
    replace,
)
from foo_ops.ops.linear import any_requires_grad
from foo_ops.ops.linear_quantized import grad_of_weight, quantize_weight

# -------------------------------------------------------------------------------- sources of copies

# Checks in about two microseconds that a weight is unchanged since its quantised copy was made.


SMALL = 2**10
"""Weights with at most this many elements are compared as a whole."""
SAMPLES = 256
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Numbers(NamedTuple):
    """A fingerprint of a weight's values.

    Attributes:
        sample: some of its elements.
        total: the sum of all its bits, read as integers.
    """

    sample: Tensor
    total: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> Numbers:
        with torch.inference_mode(False), torch.no_grad():
            return cls(sample_of(weight).clone(), total_of(weight))

    def may_be_of(self, weight: Tensor) -> bool:
        """Whether the weight has this sample; it may have moved to another device."""
        if weight.dtype != self.sample.dtype:
            return False
        return torch.equal(sample_of(weight), self.sample.to(weight.device))

    def to(self, device: torch.device) -> Numbers:
        return Numbers(*(it.to(device) for it in self))


def sample_of(weight: Tensor) -> Tensor:
    return weight.detach().as_strided(*sampled(weight))


def sampled(weight: Tensor) -> Any:
    """Return sizes, strides and offset of a sample spread over a matrix.

    It has an element of each row if there are at most `SAMPLES` rows, and ends with the matrix's
    last element, so that appended rows (new tokens) are noticed.
    """
    (rows, columns), (row, column) = weight.shape, weight.stride()
    if weight.numel() <= SMALL:
        return weight.shape, weight.stride(), weight.storage_offset()
    if weight.is_contiguous() or weight.t().is_contiguous():
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


def reader(tensor: Tensor, sizes: Any, strides: Any, offset: Any) -> Callable[[], bytes]:
    """Make a function that reads part of a CPU tensor, and holds no reference to it.

    A call takes a third of a microsecond; a view and `torch.equal` take two.
    """
    item = tensor.element_size()
    length = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
    start = tensor.untyped_storage().data_ptr() + offset * item
    memory: Any = (ctypes.c_char * (item * length if tensor.numel() else 0)).from_address(start)
    in_bytes = [item * it for it in strides]
    return np.ndarray(sizes, f"u{item}", memory, strides=in_bytes).tobytes


def total_of(weight: Tensor) -> Tensor:
    """Sum the bits of a weight, read as int64 as far as possible."""
    flat = weight.detach().reshape(-1)
    per_integer = 8 // flat.element_size()
    if flat.storage_offset() % per_integer:
        flat = flat.clone()
    whole = flat.numel() - flat.numel() % per_integer
    rest = flat[whole:].view(INTEGERS[flat.element_size()])
    return flat[:whole].view(torch.int64).sum() + rest.sum()


def note_of(weight: Tensor) -> Tensor:
    version = -1 if weight.is_inference() else weight._version
    with torch.inference_mode(False):
        return torch.tensor((weight.untyped_storage()._cdata, weight.data_ptr(), version))


class Source:
    """A weight as it was when its quantised copy was made.

    Autograd's version counter shows writes to a tensor, and a tensor that replaces it has another
    address. Nothing counts writes through ``.data``, by which adapters are merged
    (``weight.data += delta``): the sample shows them if most elements change, the total if any
    does.
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
        sample = numbers.sample
        self.readers = weight.is_cpu and (
            reader(weight, *self.sampled),
            reader(sample, sample.shape, sample.stride(), sample.storage_offset()),
        )
        self.note = note_of(weight)
        """Address, place and version in a tensor, for compiled graphs."""
        if not is_current:
            self.note.zero_()

    @classmethod
    def of(cls, weight: Tensor) -> Source:
        return cls(weight, Numbers.of(weight))

    def holds(self, weight: Tensor) -> bool:
        """Whether this is the noted weight, with the same version and sample."""
        return (
            weight.untyped_storage()._cdata == self.address
            and weight.data_ptr() == self.place
            and (self.version is None or weight._version == self.version)
            and (weight.shape, weight.stride(), weight.dtype) == self.layout
            and self.holds_sample(weight)
        )

    def holds_sample(self, weight: Tensor) -> bool:
        if not self.readers:
            return torch.equal(weight.as_strided(*self.sampled), self.numbers.sample)
        now, noted = self.readers
        return now() == noted()

    def holds_all(self, weight: Tensor) -> bool:
        """Check the total of all elements in addition to `holds`."""
        return self.holds(weight) and torch.equal(total_of(weight), self.numbers.total)


# ------------------------------------------------------------------------------------------- layers


BITS = (8, 4)
GROUP_SIZES = (64, 32)
"""For 4 bits, in the order in which they are tried: weights per scale and zero."""
BUFFERS = ("foo_weight", "foo_scale", "foo_zero")
SOURCE = "_foo_source"
"""Attribute of a layer: the `Source` of its copy."""
MANY_ROWS = 256
"""From this many rows on, reading all of a weight takes a few percent of its product's time."""

lock = threading.RLock()
"""Held while copies are renewed, so that no other thread reads a half-written one."""


class FooQuantizedLinear(Replacement):
    """Replaces linear layers, and keeps a copy of the weight in 8 or 4 bits.

    The copy is in non-persistent buffers, which move with the module. Each call checks that the
    weight is still the one that was copied, and renews the copy otherwise. In training the weight
    itself is used.
    """

    bias: Tensor | None
    training: bool
    _buffers: Any
    _parameters: Any

    @classmethod
    def recognises(cls, module: nn.Module) -> bool:
        return FooLinear.recognises(module) or FooConv1D.recognises(module)

    @classmethod
    def forget(cls, module: nn.Module) -> None:
        for name in BUFFERS:
            delattr(module, name)
        vars(module).pop(SOURCE, None)

    def forward(self, input: Tensor) -> Any:
        own = self._parameters
        weight = own.get("weight")
        # Attribute lookup is slow, and only needed under a parametrization.
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401
        if self.training or not is_multiplied(input, weight, bias):
            return super().forward(input)  # type: ignore[misc]
        output = quantized_product(input, *current_copy(self, weight, input), bias)
        if any_requires_grad(weight):
            output = output + WeightGradient.apply(output, input, turned(self, weight))
        return output

    def train(self, mode: bool = True) -> Any:
        """Check all of the weight before evaluation, also for compiled graphs."""
        made = super().train(mode)  # type: ignore[misc]
        if not mode:
            renew(self, looks_at_all=True)
        return made

    def _load_from_state_dict(self, *arguments: Any, **keywords: Any) -> None:
        super()._load_from_state_dict(*arguments, **keywords)  # type: ignore[misc]
        if not self.training:
            renew(self)

    def _apply(self, *arguments: Any, **keywords: Any) -> Any:
        """Keep a copy that moves with its weight; renew it if the weight is converted."""
        numbers = current_numbers(self)
        made = super()._apply(*arguments, **keywords)  # type: ignore[misc]
        take_over(self, numbers)
        return made

    def copied(self, state: dict[str, Any]) -> dict[str, Any]:
        """Clone the buffers, which may be parts of larger tensors (`FooJoined`)."""
        own = {name: it.clone() for name in BUFFERS if (it := self._buffers[name]) is not None}
        return {
            **state,
            "_buffers": {**state["_buffers"], **own},
            SOURCE: current_numbers(self),
        }

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        take_over(self, vars(self).pop(SOURCE, None))


def is_multiplied(input: Any, weight: Any, bias: Any) -> bool:
    """Whether a layer's copy may stand for its weight.

    It may not where `torch.func` has wrapped the weight to differentiate or map over it.
    """
    if weight is None or not can_multiply(input, weight, bias):
        return False
    return torch.compiler.is_compiling() or not is_functorch_wrapped_tensor(weight)


def quantized_product(
    input: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Multiply by weights of 8 bits, or of 4 bits if there are zeros."""
    if zero is None:
        return torch.ops.foo.linear_int8.default(input, weight, scale, bias)
    group_size = 2 * weight.shape[1] // scale.shape[1]
    return torch.ops.foo.linear_int4.default(
        input, weight, scale, zero, bias, group_size=group_size
    )


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


def turned(layer: Any, weight: Tensor) -> Tensor:
    """Return a layer's weight as (outputs, inputs)."""
    return weight.t() if isinstance(layer, Conv1D) else weight


def current_copy(layer: Any, weight: Tensor, input: Tensor) -> tuple[Any, Any, Any]:
    """Return the copy of a layer's weight, renewed first if the weight has changed."""
    own = layer._buffers
    if torch.compiler.is_compiling():
        scale = current_scale(layer, weight)
        return own["foo_weight"], scale, own["foo_zero"]
    weight = turned(layer, weight)
    looks_at_all = input.numel() >= MANY_ROWS * weight.shape[1]
    source = vars(layer).get(SOURCE)
    if len_dispatch_stack():
        with disable_current_modes():
            renew(layer, looks_at_all)
    elif looks_at_all or source is None or not source.holds(weight):
        renew(layer, looks_at_all)
    return own["foo_weight"], own["foo_scale"], own["foo_zero"]


def renew(layer: Any, looks_at_all: bool = False) -> None:
    """Renew a layer's copy if its weight is no longer the one that was copied."""
    weight = layer._parameters.get("weight")
    if not has_numbers(weight):
        return
    weight = turned(layer, weight)
    with lock:
        source = vars(layer).get(SOURCE)
        holds = source is not None and (source.holds_all if looks_at_all else source.holds)
        if not holds or not holds(weight):
            _, scale, zero = (layer._buffers[name] for name in BUFFERS)
            group_size = None if zero is None else weight.shape[1] // scale.shape[1]
            make_copy(layer, weight, group_size)


def make_copy(layer: Any, weight: Tensor, group_size: int | None) -> None:
    """Quantise a weight, (outputs, inputs), into a layer's buffers, and note it."""
    # Noted first, so that writes in the meantime are noticed.
    source = Source.of(weight) if has_numbers(weight) else None
    bits = 8 if group_size is None else 4
    with torch.inference_mode(False), torch.no_grad():
        tensors = (*quantize_weight(weight, bits, group_size), None)
        for name, tensor in zip(BUFFERS, tensors):
            write_buffer(layer, name, tensor)
    vars(layer)[SOURCE] = source


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
        if not torch.equal(now, note) or not torch.equal(sample_of(weight), sample):
            bits, size = (8, None) if zero is None else (4, weight.shape[1] // scale.shape[1])
            tensors = quantize_weight(weight, bits, size)
            for held, tensor in zip((copy, scale, zero), tensors):
                held.copy_(tensor)  # type: ignore[union-attr]
            sample.copy_(sample_of(weight))
            note.copy_(now)
    return scale.clone()


@torch.library.register_fake("foo_transformers::current_scale")
def fake_scale(scale: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(scale)


def current_scale(layer: Any, weight: Tensor) -> Tensor:
    scale, source = layer._buffers["foo_scale"], getattr(layer, SOURCE)
    # An exported program keeps the copies as they were.
    if source is None or torch.compiler.is_exporting():
        return scale
    own, weight = layer._buffers, turned(layer, weight.detach())
    return torch.ops.foo_transformers.current_scale(
        scale, own["foo_weight"], own["foo_zero"], weight, source.numbers.sample, source.note
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


def current_numbers(layer: Any) -> Numbers | None:
    """Return the fingerprint of a layer's weight, if its copy is current."""
    weight, source = layer._parameters.get("weight"), vars(layer).get(SOURCE)
    if source is None or not has_numbers(weight) or not source.holds(turned(layer, weight)):
        return None
    numbers: Numbers | None = source.numbers
    return numbers


def take_over(layer: Any, numbers: Numbers | None) -> None:
    """Note the weight of a layer that was copied or moved; its copy is current if numbers match."""
    weight = layer._parameters.get("weight")
    vars(layer)[SOURCE] = None
    if not has_numbers(weight):
        return
    weight = turned(layer, weight)
    if numbers is not None and numbers.may_be_of(weight):
        vars(layer)[SOURCE] = Source(weight, numbers.to(weight.device))
    else:
        vars(layer)[SOURCE] = Source(weight, Numbers.of(weight), is_current=False)


def check_bits(bits: int | None) -> None:
    if bits is not None and bits not in BITS:
        raise ValueError(f"apply: quantize must be None, 8 or 4, got {bits}")


def quantize(module: nn.Module, bits: int) -> None:
    """Quantise the weight of a linear layer, also after an earlier `apply`.

    With 4 bits, a layer whose width is no multiple of a group size stays as it is.
    """
    if is_replaced(module) and isinstance(module, (FooLinear, FooConv1D, FooQuantizedLinear)):
        put_back(module)
    if not FooQuantizedLinear.recognises(module):
        return
    weight, group_size = turned(module, module.weight), None  # type: ignore[arg-type]
    if bits == 4:
        group_size = next((it for it in GROUP_SIZES if weight.shape[1] % it == 0), None)
        if group_size is None:
            return
    make_copy(module, weight, group_size)
    replace(module, FooQuantizedLinear)


# ----------------------------------------------------------------------- layers with the same input

# Their weights lie together in memory, for one product.


JOINED = "_foo_joined"
"""Attribute of a module whose layers are joined."""


class Joined(NamedTuple):
    """Common tensors of several layers, whose buffers are parts of them.

    Attributes:
        parts: the buffers of each layer, in the order of `BUFFERS`.
        tensors: the rows of all layers, in order.
        rows: how many rows each layer has.
    """

    parts: Sequence[tuple[Tensor | None, ...]]
    tensors: Sequence[Any]
    rows: list[int]

    def holds(self, layers: Sequence[nn.Module]) -> bool:
        """Whether the layers still have these buffers; a move replaces them."""
        for layer, (weight, scale, zero) in zip(layers, self.parts):
            own = layer._buffers
            if own.get("foo_weight") is not weight or own.get("foo_scale") is not scale:
                return False
            if own.get("foo_zero") is not zero:
                return False
        return True


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


def joined_buffers(layers: Sequence[nn.Module]) -> Joined | None:
    if not all(isinstance(layer, FooQuantizedLinear) for layer in layers):
        return None
    buffers = [[layer._buffers[name] for name in BUFFERS] for layer in layers]
    layouts = {tuple(layout_of(it) for it in parts) for parts in buffers}
    if len(layouts) > 1:
        return None
    rows = [len(weight) for weight, _, _ in buffers]  # type: ignore[arg-type]
    with torch.inference_mode(False), torch.no_grad():
        tensors: Any = [None if parts[0] is None else torch.cat(parts) for parts in zip(*buffers)]
    for name, tensor in zip(BUFFERS, tensors):
        if tensor is not None:
            for layer, part in zip(layers, tensor.split(rows)):
                layer._buffers[name] = part.detach()
    parts = [tuple(layer._buffers[name] for name in BUFFERS) for layer in layers]
    return Joined(parts, tensors, rows)


def layout_of(tensor: Tensor | None) -> Any:
    """Return the properties that tensors must share to be concatenated by rows."""
    return None if tensor is None else (tensor.shape[1:], tensor.dtype, tensor.device)


def products(module: Any, names: Sequence[str], input: Tensor) -> Sequence[Tensor]:
    """Return the outputs of some layers for one input, by one product if they are joined."""
    layers: Any = [module._modules[name] for name in names]
    # A compiled graph would depend on the identity of the buffers.
    joined = None if torch.compiler.is_compiling() else vars(module).get(JOINED)
    if joined is None or not all(is_lone(layer, input) for layer in layers):
        return [layer(input) for layer in layers]
    biases = [bias for it in layers if (bias := it._parameters["bias"]) is not None]
    for layer in layers:
        current_copy(layer, layer._parameters["weight"], input)
    if len(biases) not in (0, len(layers)) or not joined.holds(layers):
        return [layer(input) for layer in layers]
    weight, scale, zero = joined.tensors
    bias = torch.cat(biases) if biases else None
    output = quantized_product(input, weight, scale, zero, bias)
    return output.split_with_sizes(joined.rows, -1)


def is_lone(layer: Any, input: Tensor) -> bool:
    """Whether a layer multiplies by its buffers and adds its own bias, and does nothing else."""
    own = layer._parameters
    if type(layer).forward is not FooQuantizedLinear.forward or "bias" not in own:
        return False
    weight = own.get("weight")
    if layer.training or has_hooks(layer) or not is_multiplied(input, weight, own["bias"]):
        return False
    return not any_requires_grad(weight)
