"""One table of all operators, for tests and benchmarks: samples, references, error budgets.

A new operator is covered by adding its `OpSpec` to `OPERATORS`: tests/test_operators.py takes
values, gradients, layouts, opcheck and compilation from there.

Results are not compared within a tolerance that was found by trial, but within an *error budget*:
a bound for each element, in float64, that follows from how often the operator may round and from
the magnitude of what is rounded. What breaks a budget is a bug, or an algorithm that rounds more
often than its budget allows, and then that must be argued there.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from foo_ops import reference

Tensors = tuple[Tensor, ...]
Dtypes = tuple[torch.dtype, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The arguments of one call: tensors are positional, the rest are keywords."""

    inputs: tuple[Tensor | None, ...]
    keywords: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def map(self, function: Callable[[Tensor], Tensor]) -> Sample:
        inputs = tuple(None if tensor is None else function(tensor) for tensor in self.inputs)
        return dataclasses.replace(self, inputs=inputs)

    def to(self, device: str) -> Sample:
        """On a device, with the strides and the offset that each tensor has."""
        return self.map(lambda tensor: copy_with_layout(tensor, device))

    def exact(self) -> Sample:
        """In float64 or complex128, on the cpu."""
        return self.map(exact)

    def requiring_grad(self) -> Sample:
        """With fresh leaves; those that can have a gradient require one."""
        return self.map(
            lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex())
        )

    def differentiable(self) -> list[Tensor]:
        return [tensor for tensor in self.inputs if tensor is not None and tensor.requires_grad]

    def call(self, function: Callable[..., Any]) -> Tensors:
        result = function(*self.inputs, **self.keywords)
        return (result,) if isinstance(result, Tensor) else tuple(result)


@dataclasses.dataclass(frozen=True)
class OpSpec:
    """An operator, and what shows that it is right.

    Attributes:
        operator: the functional overload in ``torch.ops.foo``.
        dtypes: those that the samples come in.
        samples: by name, what makes the sample in a dtype. Tensors are on the cpu.
        essential: the names of a few small samples that stand for all of them where a check is
            slow: gradcheck, opcheck, compilation.
        in_layouts: the names of those whose tensors are also given every one of `LAYOUTS`.
        sized: a sample for a dtype and a size that every dimension of interest grows with.
        large: a sample that the launcher cuts into several tasks.
        reference: the same function, in float64, on the cpu.
        output_budget: how far each output may be from the reference's, of a sample in float64.
        gradient_budget: how far each gradient may be, of a sample in float64, whose tensors
            require gradients as those of the call did, the dtypes that these gradients are
            stored in, and the gradients of the outputs.
    """

    operator: torch._ops.OpOverload
    dtypes: Sequence[torch.dtype]
    samples: Mapping[str, Callable[[torch.dtype], Sample]]
    essential: Collection[str]
    in_layouts: Collection[str]
    sized: Callable[[torch.dtype, int], Sample]
    large: Callable[[torch.dtype], Sample]
    reference: Callable[..., Tensor | Tensors]
    output_budget: Callable[[Sample, torch.dtype], Tensors]
    gradient_budget: Callable[[Sample, Dtypes, Tensors], Tensors]

    @property
    def name(self) -> str:
        return self.operator.name()

    def __repr__(self) -> str:
        return self.name


# ------------------------------------------------------------------------------------ comparing


def check_outputs(spec: OpSpec, sample: Sample, dtype: torch.dtype, outputs: Tensors) -> None:
    """Assert that what the operator gave for a sample is within its error budget."""
    exact_sample = sample.exact()
    expected = exact_sample.call(spec.reference)
    budgets = spec.output_budget(exact_sample, dtype)
    assert len(outputs) == len(expected) == len(budgets)
    for position, (output, value, budget) in enumerate(zip(outputs, expected, budgets)):
        assert_within(f"output {position}", output, value, budget)


def check_gradients(spec: OpSpec, sample: Sample, gradients: Tensors, cotangents: Tensors) -> None:
    """Assert that the gradients of a sample's tensors are within their error budget.

    Args:
        gradients: of the tensors of ``sample`` that require one, in their order.
        cotangents: the gradients of the operator's outputs that they were computed from.
    """
    exact_sample = sample.map(lambda t: exact(t).detach().requires_grad_(t.requires_grad))
    outputs = exact_sample.call(spec.reference)
    exact_cotangents = tuple(exact(cotangent) for cotangent in cotangents)
    expected = torch.autograd.grad(outputs, exact_sample.differentiable(), exact_cotangents)
    with torch.no_grad():
        dtypes = tuple(tensor.dtype for tensor in sample.differentiable())
        budgets = spec.gradient_budget(exact_sample, dtypes, exact_cotangents)
    assert len(gradients) == len(expected) == len(budgets)
    for position, (gradient, value, budget) in enumerate(zip(gradients, expected, budgets)):
        assert_within(f"gradient {position}", gradient, value, budget)


def cotangents_for(outputs: Tensors) -> Tensors:
    """Random gradients of the outputs, the same for the same shapes on every device."""
    generator = torch.Generator().manual_seed(len(outputs))
    return tuple(
        torch.randn(output.shape, dtype=output.dtype, generator=generator).to(output.device)
        for output in outputs
    )


def assert_within(what: str, actual: Tensor, expected: Tensor, budget: Tensor) -> None:
    """Assert |actual - expected| <= budget, element by element; NaN and infinities must agree."""
    assert actual.shape == expected.shape, f"{what} has shape {actual.shape}, not {expected.shape}"
    value = exact(actual)
    error = (value - expected).abs()
    wrong = ~((value == expected) | (error <= budget) | (value.isnan() & expected.isnan()))
    if not wrong.any():
        return
    excess = torch.where(wrong, (error / budget).nan_to_num(math.inf, math.inf), 0)
    worst = excess.flatten().argmax()
    place = tuple(int(index) for index in torch.unravel_index(worst, excess.shape))
    raise AssertionError(
        f"{what} is wrong in {int(wrong.sum())} of {wrong.numel()} elements; the worst, at "
        f"{place}, is {value[place].item()} instead of {expected[place].item()}, "
        f"where {budget[place].item():.3g} is allowed"
    )


def exact(tensor: Tensor) -> Tensor:
    """The same numbers in float64 or complex128, on the cpu; bool stays bool."""
    tensor = tensor.cpu()
    if tensor.dtype == torch.bool:
        return tensor
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


# -------------------------------------------------------------------------------------- layouts


def copy_with_layout(tensor: Tensor, device: str) -> Tensor:
    """A copy of the whole storage on a device, seen with the tensor's own strides and offset."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((elements,), (1,), 0).to(device, copy=True)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def junk(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Elements that must not be read: NaN, or for bool True."""
    value = True if tensor.dtype == torch.bool else math.nan
    return torch.full(tuple(shape), value, dtype=tensor.dtype, device=tensor.device)


def reversed_dimensions(tensor: Tensor) -> Tensor:
    """The first dimension is dense in memory, the last has the largest stride."""
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


def every_second(tensor: Tensor) -> Tensor:
    """The last dimension has stride 2."""
    return torch.stack((tensor, junk(tensor, tensor.shape)), -1)[..., 0]


def inside_padding(tensor: Tensor) -> Tensor:
    """A slice of a larger tensor in every dimension, so that no two dimensions can be merged."""
    larger = junk(tensor, [size + 3 for size in tensor.shape])
    place = tuple(slice(1, 1 + size) for size in tensor.shape)
    larger[place] = tensor
    return larger[place]


def at_odd_offset(tensor: Tensor) -> Tensor:
    """Dense, but its first element is aligned to nothing but the element's size."""
    flat = torch.cat((junk(tensor, [3]), tensor.flatten()))
    return flat[3:].view(tensor.shape)


def second_and_third_exchanged(tensor: Tensor) -> Tensor:
    """As (batch, length, heads, head_dim) lies in memory, seen as (batch, heads, length, ...)."""
    if tensor.dim() < 3:
        return tensor
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def expanded(tensor: Tensor) -> Tensor:
    """The first slice of each dimension but the last, repeated with stride 0."""
    first = tensor[tuple(slice(0, 1) for _ in tensor.shape[:-1])]
    return first.expand(tensor.shape) if tensor.numel() > 0 else tensor


LAYOUTS = (
    reversed_dimensions,
    every_second,
    inside_padding,
    at_odd_offset,
    second_and_third_exchanged,
    expanded,
)


# ------------------------------------------------------------------------------------- rounding


def roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to nearest."""
    return torch.finfo(dtype).eps / 2


def smallest(dtype: torch.dtype) -> float:
    """The smallest positive number: rounding errs by half of it where numbers are subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def compute_type(dtype: torch.dtype) -> torch.dtype:
    """What sums are accumulated in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def random(name: str, *shapes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Normal random tensors, the same for the same name in every process, and in every dtype."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return [
        torch.randn(tuple(shape), dtype=wide, generator=generator).to(dtype) for shape in shapes
    ]


# ------------------------------------------------------------------------------------------ abs

ABS_SHAPES: dict[str, tuple[int, ...]] = {
    "0-d": (),
    "empty": (0,),
    "empty inside": (3, 0, 2),
    "one": (1,),
    "odd": (7,),
    "vector and tail": (67,),
    "matrix": (5, 7),
    "4-d": (2, 3, 4, 5),
    "6-d": (2, 1, 3, 1, 2, 2),
    "several tasks": (3, 33_333),
}


def abs_sample(name: str, shape: Sequence[int]) -> Callable[[torch.dtype], Sample]:
    return lambda dtype: Sample(tuple(random(name, shape, dtype=dtype)))


def abs_special(dtype: torch.dtype) -> Sample:
    values = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0]
    if dtype.is_complex:
        parts = [(real, imag) for real in values for imag in values]
        return Sample((torch.tensor([complex(*pair) for pair in parts], dtype=dtype),))
    info = torch.finfo(dtype)
    values += [info.min, info.max, -info.tiny, -info.smallest_normal / 2, -smallest(dtype)]
    return Sample((torch.tensor(values, dtype=dtype),))


def abs_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    """Real: exact. Complex: the squares, their sum and the root are rounded in float64, then the
    result to the dtype; the reference rounds in float64 too."""
    (value,) = sample.call(reference.abs)
    if not dtype.is_complex:
        return (torch.zeros_like(value),)
    part = dtype.to_real()
    return ((roundoff(part) + 5 * roundoff(torch.float64)) * value + smallest(part),)


def abs_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Real: exact. Complex: sgn rounds in the modulus (3), the division and the product (3)."""
    (dtype,), (cotangent,) = dtypes, cotangents
    rounded = 6 * roundoff(dtype.to_real()) if dtype.is_complex else 0.0
    return (rounded * cotangent.abs(),)


ABS = OpSpec(
    operator=torch.ops.foo.abs.default,
    dtypes=(
        *(torch.float32, torch.float64, torch.bfloat16, torch.float16),
        *(torch.complex64, torch.complex128),
    ),
    samples={name: abs_sample(name, shape) for name, shape in ABS_SHAPES.items()}
    | {"special values": abs_special},
    essential=("0-d", "empty inside", "vector and tail", "4-d"),
    in_layouts=ABS_SHAPES.keys(),
    sized=lambda dtype, size: abs_sample("sized", (size, size + 1))(dtype),
    large=abs_sample("large", (7, 50_001)),
    reference=reference.abs,
    output_budget=abs_output_budget,
    gradient_budget=abs_gradient_budget,
)


# ------------------------------------------------------------------------------------ attention


def attention_sample(
    *,
    batch: int = 2,
    heads: int = 2,
    key_heads: int | None = None,
    queries: int = 9,
    keys: int = 11,
    head_dim: int = 16,
    value_dim: int | None = None,
    bias: Callable[[torch.dtype], Tensor] | None = None,
    **keywords: Any,
) -> Callable[[torch.dtype], Sample]:
    """The maker of a sample with random query, key and value of these sizes."""
    key_heads = heads if key_heads is None else key_heads
    value_dim = head_dim if value_dim is None else value_dim

    def make(dtype: torch.dtype) -> Sample:
        tensors = random(
            f"attention {batch} {heads} {key_heads} {queries} {keys} {head_dim} {value_dim}",
            (batch, heads, queries, head_dim),
            (batch, key_heads, keys, head_dim),
            (batch, key_heads, keys, value_dim),
            dtype=dtype,
        )
        return Sample((*tensors, None if bias is None else bias(dtype)), keywords)

    return make


def random_bias(*shape: int, float32: bool = False) -> Callable[[torch.dtype], Tensor]:
    """In the query's dtype or in float32."""
    return lambda dtype: random(f"{shape}", shape, dtype=torch.float32 if float32 else dtype)[0]


def random_mask(*shape: int, blind: Sequence[int] = ()) -> Callable[[torch.dtype], Tensor]:
    """A bool mask with one half True; the rows ``blind`` see no key."""

    def make(dtype: torch.dtype) -> Tensor:
        mask = random(f"mask {shape}", shape, dtype=torch.float64)[0] > 0
        mask[..., list(blind), :] = False
        return mask

    return make


def half_infinite_bias(*shape: int) -> Callable[[torch.dtype], Tensor]:
    """A bias with -inf in the places where a mask would be False; the last row sees nothing."""
    sees = random_mask(*shape, blind=[-1])
    return lambda dtype: random_bias(*shape)(dtype).where(sees(dtype), -math.inf)


def large_scores(dtype: torch.dtype) -> Sample:
    """Scores of up to 1e4, and softmaxes that are a single one: exp must never overflow."""
    query, *others = attention_sample(head_dim=32, keys=70)(dtype).inputs
    assert query is not None
    return Sample((query * 1000, *others))


def rising_scores(dtype: torch.dtype) -> Sample:
    """The largest score comes last, so that every tile of keys rescales what came before."""
    sample = attention_sample(queries=3, keys=300, head_dim=8, scale=0.5)(dtype)
    query, key, *others = sample.inputs
    assert query is not None
    assert key is not None
    steps = torch.linspace(0, 40, 300, dtype=torch.float64).unsqueeze(-1).to(dtype)
    return Sample((torch.ones_like(query), key * 0.1 + steps, *others), sample.keywords)


SMALL: dict[str, Any] = {"queries": 3, "keys": 5, "head_dim": 3}
HEAD_DIMS = (1, 3, 16, 37, 64, 80, 128, 256)
LENGTHS = ((1, 1), (1, 129), (63, 64), (64, 65), (65, 63), (127, 129), (129, 127), (130, 1))
HEADS = ((1, 1), (2, 1), (4, 2), (8, 1), (6, 2), (4, 4))

ATTENTION_SAMPLES: dict[str, Callable[[torch.dtype], Sample]] = {
    "plain": attention_sample(),
    "causal": attention_sample(queries=11, is_causal=True),
    "more keys than queries, causal": attention_sample(queries=7, keys=13, is_causal=True),
    "more queries than keys, causal": attention_sample(queries=13, keys=7, is_causal=True),
    **{f"head dim {dim}": attention_sample(head_dim=dim, keys=66) for dim in HEAD_DIMS},
    "value dim 5 of 16": attention_sample(value_dim=5),
    "value dim 100 of 8": attention_sample(head_dim=8, value_dim=100, is_causal=True),
    "value dim 1 of 256": attention_sample(head_dim=256, value_dim=1),
    **{
        f"{queries} queries, {keys} keys{', causal' * is_causal}": attention_sample(
            batch=1, queries=queries, keys=keys, is_causal=is_causal
        )
        for queries, keys in LENGTHS
        for is_causal in (False, True)
    },
    **{
        f"{heads} heads on {key_heads}{', causal' * is_causal}": attention_sample(
            heads=heads, key_heads=key_heads, queries=70, is_causal=is_causal
        )
        for heads, key_heads in HEADS
        for is_causal in (False, True)
    },
    "no batch": attention_sample(batch=0),
    "no heads": attention_sample(heads=0),
    "no queries": attention_sample(queries=0),
    "no keys": attention_sample(keys=0),
    "no keys, causal": attention_sample(keys=0, is_causal=True),
    "no keys, bias": attention_sample(keys=0, bias=random_bias(2, 1, 9, 1)),
    "no queries, bias": attention_sample(queries=0, bias=random_bias(1, 1, 1, 11)),
    "scale 0": attention_sample(scale=0.0),
    "scale 3": attention_sample(scale=3.0, is_causal=True),
    "negative scale": attention_sample(scale=-0.5, bias=random_bias(9, 11)),
    "large scores": large_scores,
    "rising scores": rising_scores,
    "bias (Sq, Sk)": attention_sample(bias=random_bias(9, 11)),
    "bias (1, 1, 1, Sk)": attention_sample(bias=random_bias(1, 1, 1, 11)),
    "bias (Sk)": attention_sample(bias=random_bias(11), is_causal=True),
    "bias (B, 1, Sq, Sk)": attention_sample(bias=random_bias(2, 1, 9, 11)),
    "bias (B, 1, 1, Sk)": attention_sample(bias=random_bias(2, 1, 1, 11)),
    "bias (1, H, 1, 1)": attention_sample(bias=random_bias(1, 2, 1, 1)),
    "bias (H, Sq, Sk)": attention_sample(bias=random_bias(2, 9, 11), is_causal=True),
    "bias (B, H, Sq, Sk)": attention_sample(bias=random_bias(2, 2, 9, 11)),
    "bias (Sq, 1)": attention_sample(bias=random_bias(9, 1)),
    "bias 0-d": attention_sample(bias=random_bias()),
    "bias (1, 1)": attention_sample(bias=random_bias(1, 1), is_causal=True),
    "bias in float32": attention_sample(bias=random_bias(2, 9, 11, float32=True)),
    "bias over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(130, 131), is_causal=True
    ),
    "bias (B, 1, 1, Sk) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(2, 1, 1, 131)
    ),
    "bias (1, H, Sq, 1) over several tiles": attention_sample(
        queries=130, keys=131, bias=random_bias(1, 2, 130, 1)
    ),
    "bias 0-d over several tiles": attention_sample(queries=130, keys=131, bias=random_bias()),
    "bias for grouped heads": attention_sample(
        heads=6, key_heads=2, bias=random_bias(6, 9, 11), is_causal=True
    ),
    "bias with -inf": attention_sample(bias=half_infinite_bias(9, 11)),
    "bias of -inf alone": attention_sample(
        bias=lambda dtype: torch.full((1, 2, 1, 1), -math.inf, dtype=dtype)
    ),
    "mask (Sq, Sk)": attention_sample(bias=random_mask(9, 11)),
    "mask (B, 1, 1, Sk)": attention_sample(bias=random_mask(2, 1, 1, 11)),
    "mask with rows that see nothing": attention_sample(
        bias=random_mask(2, 2, 9, 11, blind=[0, 4, 8])
    ),
    "mask with rows that see nothing, causal": attention_sample(
        queries=70, keys=70, bias=random_mask(70, 70, blind=[1, 64]), is_causal=True
    ),
    "small, grouped heads and bias": attention_sample(
        **SMALL, heads=4, key_heads=2, value_dim=2, bias=random_bias(4, 1, 5), is_causal=True
    ),
    "small, mask with a row that sees nothing": attention_sample(
        **SMALL, bias=random_mask(2, 1, 3, 5, blind=[1])
    ),
    "small, row of -inf": attention_sample(**SMALL, bias=half_infinite_bias(3, 5), scale=0.7),
    "mask 0-d, True": attention_sample(bias=lambda dtype: torch.tensor(True)),
    "mask 0-d, False": attention_sample(bias=lambda dtype: torch.tensor(False)),
}


@dataclasses.dataclass(frozen=True)
class AttentionError:
    """Bounds for the errors of the forward pass, to first order, from the exact values.

    A sum of n products errs by at most n u times the sum of their magnitudes, in any order, where
    u is the roundoff of the compute type. u_out is that of the dtype, in which results are stored.

        score    s = scale q.k + bias         D + 3 roundings
        weight   p = exp(s - logsumexp)       what s and the logsumexp err by, and exp's own part
        output   o = sum p v                  what p errs by, the sum, and one rounding to the dtype

    Each exponential errs by 2 units in the last place, and those of a running maximum multiply up
    once a tile: with the sum of the weights, at most 4 roundings a key, and 32 to begin with.
    Magnitudes are of shape (batch, heads, queries, keys or value_dim), relative errors as well.
    """

    unit: float
    scale: float
    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    output: Tensor
    weight_error: Tensor
    output_error: Tensor
    logsumexp_error: Tensor

    @classmethod
    def of(cls, sample: Sample, dtype: torch.dtype) -> AttentionError:
        query, key, value = (tensor_at(sample, position) for position in range(3))
        bias = sample.inputs[3]
        keywords = dict(sample.keywords)
        scale = keywords.get("scale")
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        # For float64 the reference itself errs as much.
        unit = roundoff(compute_type(dtype)) * (2 if dtype == torch.float64 else 1)
        key, value = (reference.for_each_query_head(tensor, query) for tensor in (key, value))
        output, logsumexp = reference.attention(query, key, value, bias, **keywords)
        scores = reference.masked_scores(query, key, bias, **keywords)
        sees = scores > -math.inf
        weights = torch.exp(scores - logsumexp.unsqueeze(-1)).where(sees, 0)

        magnitude = abs(scale) * (query.abs() @ key.abs().mT)
        if bias is not None and bias.dtype != torch.bool:
            magnitude = magnitude + bias.abs()
        magnitude = magnitude.where(sees, 0)
        magnitude = magnitude.amax(-1) if key.shape[2] > 0 else magnitude.sum(-1)
        score_error = (query.shape[-1] + 3) * unit * magnitude
        sum_error = (4 * key.shape[2] + 32) * unit
        logsumexp = logsumexp.where(logsumexp > -math.inf, 0)
        logsumexp_error = score_error + sum_error + unit * logsumexp.abs()
        weight_error = torch.expm1(score_error + logsumexp_error).unsqueeze(-1)
        output_error = (weight_error + key.shape[2] * unit) * (weights @ value.abs())
        output_error = output_error + roundoff(dtype) * output.abs() + smallest(dtype)
        return cls(
            *(unit, scale, query, key, value, weights, output),
            *(weight_error, output_error, logsumexp_error),
        )


def attention_output_budget(sample: Sample, dtype: torch.dtype) -> Tensors:
    error = AttentionError.of(sample, dtype)
    return error.output_error, error.logsumexp_error


# A value, the total magnitude of the products summed up in it, what their factors' errors make of
# it, and how many products there are.
ErrorTerms = tuple[Tensor, Tensor, Tensor, int]


def attention_gradient_budget(sample: Sample, dtypes: Dtypes, cotangents: Tensors) -> Tensors:
    """Errors of the backward pass, which starts from the stored output and logsumexp:

    delta    d = sum(do o) - dlogsumexp       o was rounded to the dtype
    score    ds = p (sum(do v) - d)
    query    dq = scale sum ds k              rounded to the dtype once, as all that follow
    key      dk = scale sum ds q              over the queries of all heads that it serves
    value    dv = sum p do
    bias     db = sum ds                      over what it was broadcast to
    """
    dtype = dtypes[0]
    error = AttentionError.of(sample, dtype)
    query, key, value = error.query, error.key, error.value
    unit, scale, weights = error.unit, error.scale, error.weights
    grad_output, grad_logsumexp = cotangents
    count = value.shape[-1]
    # A weight near the smallest normal number of the compute type may count as zero.
    tiny = 2 * torch.finfo(compute_type(dtype)).smallest_normal
    weights_error = weights * error.weight_error + tiny

    products, product_sizes = grad_output @ value.mT, grad_output.abs() @ value.abs().mT
    delta = (grad_output * error.output).sum(-1, keepdim=True) - grad_logsumexp.unsqueeze(-1)
    delta_size = (grad_output * error.output).abs().sum(-1, keepdim=True)
    delta_size = delta_size + grad_logsumexp.abs().unsqueeze(-1)
    delta_error = (grad_output.abs() * error.output_error).sum(-1, keepdim=True)
    delta_error = delta_error + (count + 4) * unit * delta_size
    grad_scores = weights * (products - delta)
    grad_scores_error = weights_error * (products - delta).abs() + weights * (
        (count + 3) * unit * product_sizes + delta_error
    )

    def product(left: Tensor, left_error: Tensor, right: Tensor, groups: int = 1) -> ErrorTerms:
        """left @ right, summed over groups of heads that share a head of key and value."""
        terms = (left @ right, left.abs() @ right.abs(), left_error @ right.abs())
        value, size, error = (
            term.unflatten(1, (-1, groups)).sum(2) if groups > 1 else term for term in terms
        )
        return value, size, error, (left.shape[-1] * groups + 2)

    groups = query.shape[1] // max(tensor_at(sample, 1).shape[1], 1)
    by_score, by_score_error = scale * grad_scores, abs(scale) * grad_scores_error
    terms = [
        product(by_score, by_score_error, key),
        product(by_score.mT, by_score_error.mT, query, groups),
        product(weights.mT, weights_error.mT, grad_output, groups),
    ]
    if len(dtypes) > len(terms):
        shape = tensor_at(sample, 3).shape
        sums = (grad_scores, grad_scores.abs(), grad_scores_error)
        value, size, bias_error = (term.sum_to_size(shape) for term in sums)
        terms.append((value, size, bias_error, grad_scores.numel() // max(shape.numel(), 1)))
    return tuple(
        propagated + length * unit * size + roundoff(stored) * value.abs() + smallest(stored)
        for (value, size, propagated, length), stored in zip(terms, dtypes)
    )


def tensor_at(sample: Sample, position: int) -> Tensor:
    tensor = sample.inputs[position]
    assert tensor is not None
    return tensor


ATTENTION = OpSpec(
    operator=torch.ops.foo.attention.default,
    dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16),
    samples=ATTENTION_SAMPLES,
    essential=(
        "small, grouped heads and bias",
        "small, mask with a row that sees nothing",
        "small, row of -inf",
    ),
    in_layouts=(
        "small, grouped heads and bias",
        "head dim 37",
        "head dim 64",
        "4 heads on 2, causal",
        "bias over several tiles",
        "bias in float32",
        "mask with rows that see nothing, causal",
    ),
    sized=lambda dtype, size: attention_sample(
        heads=4,
        key_heads=2,
        queries=size,
        keys=size + 3,
        head_dim=8,
        value_dim=4,
        bias=random_bias(2, 1, 1, size + 3),
        is_causal=True,
    )(dtype),
    large=attention_sample(
        heads=4, key_heads=2, queries=200, keys=230, bias=random_bias(2, 1, 200, 1), is_causal=True
    ),
    reference=reference.attention,
    output_budget=attention_output_budget,
    gradient_budget=attention_gradient_budget,
)


OPERATORS = (ABS, ATTENTION)
