"""Lists the cases of the benchmark; a new row is a new case here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from benchmarks import (
    adapters,
    attention,
    decode,
    device,
    encoders,
    examples,
    experts,
    flex,
    flex_gallery,
    kit,
    linear,
    linear_cross_entropy,
    loading,
    models,
    operators,
    peaks,
    quantized_linear,
    tutorial,
)
from benchmarks.measure import OURS, Case, Contenders, Local, Reference, calls_per_turn
from benchmarks.targets import DECODING_LENGTH, FLOAT32, SHORT_LENGTH
from benchmarks.workload import Workload
from foo_ops.library.operators import dtype_name

FEW_DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "backward")
HEADLINE_LENGTH, HEADLINE_HEAD_DIM = 2048, 64
OPTIONS: tuple[dict[str, Any], ...] = (
    {"is_causal": True, "head_dim": 192, "value_dim": 128},
    {"has_bias": True},
    {"dropout_p": 0.1},
    {"is_causal": True, "window": 128},
    {"is_causal": True, "is_packed": True},
)
"""Options without a fused kernel in PyTorch, or computed in full. The first are DeepSeek's."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of all cases.

    Attributes:
        elements: elements of abs.
        rows: rows of the operators besides attention.
        tokens: tokens in the loss of a linear layer.
        classes: classes in the same loss.
        dtypes: dtypes of attention.
        lengths: numbers of queries and of keys.
        head_dims: head dimensions, combined with all dtypes, directions and masks.
        single_head: length for one head, to measure scaling over threads.
        shared: length for 32 query heads that share 8 of key and value.
        options: length for each of `OPTIONS`.
        caches: lengths of key and value in decoding.
        experts: numbers of tokens for the experts of a mixture.
        flex: length for most rows of flex attention.
        model: sizes of a whole model and its tokens.
    """

    elements: tuple[int, ...] = (2**20, 2**25)
    rows: int = 2048
    tokens: int = 1024
    classes: tuple[int, ...] = linear_cross_entropy.CLASSES
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    lengths: tuple[int, ...] = (128, 512, 2048)
    head_dims: tuple[int, ...] = (64, 128)
    single_head: int = 2048
    shared: int = 512
    options: int = 1024
    caches: tuple[int, ...] = (512, 2048, 8192, 32768)
    experts: tuple[int, ...] = experts.TOKENS
    flex: int = 2048
    model: models.Size = models.DEFAULT
    encoder: encoders.Size = encoders.DEFAULT
    decode: decode.Size = decode.DEFAULT
    loading: loading.Size = loading.DEFAULT


DEFAULT = Sizes()
FULL = replace(DEFAULT, lengths=(128, 512, 2048, 8192))
QUICK = Sizes(
    elements=(2**16,),
    rows=16,
    tokens=64,
    classes=(2000,),
    lengths=(128,),
    head_dims=(64,),
    single_head=256,
    shared=128,
    options=256,
    caches=(1024,),
    experts=(1, 8),
    flex=256,
    model=models.QUICK,
    encoder=encoders.QUICK,
    decode=decode.QUICK,
    loading=loading.QUICK,
)


def cases(
    sizes: Sizes, threads: tuple[int, ...], single: tuple[int, ...] | None = None
) -> list[Case]:
    """List the cases, most of them on each number of threads.

    Rows of what no number of threads is asked of have the numbers ``single``: by default the last.
    """
    single = single or threads[-1:]
    return [
        *call_cases(),
        *(it for count in single for it in abs_cases(sizes.elements, count)),
        *device.cases(sizes.elements, threads[-1]),
        *operators.cases(operators.SECTION, operators.OPERATORS, sizes.rows, sizes.dtypes, threads),
        *linear.cases(sizes.dtypes, threads),
        *quantized_linear.cases(sizes.dtypes, threads),
        *(it for count in single for it in experts.cases(sizes.experts, count)),
        *linear_cross_entropy.cases(sizes.tokens, sizes.classes, FEW_DTYPES, threads),
        *operators.cases(tutorial.SECTION, tutorial.OPERATORS, sizes.rows, sizes.dtypes, threads),
        *(it for count in single for it in examples.cases(sizes.rows, count)),
        *(attention_case(workload, threads) for workload in square_workloads(sizes)),
        *(attention_case(workload, threads) for workload in single_head_workloads(sizes)),
        *(attention_case(workload, threads) for workload in shared_workloads(sizes)),
        *(attention_case(workload, threads) for workload in option_workloads(sizes)),
        *(decoding_case(workload, threads) for workload in decoding_workloads(sizes)),
        *flex.cases(sizes.flex, FEW_DTYPES),
        *flex_gallery.cases(2 * sizes.flex, FEW_DTYPES),
        *(it for count in single for it in models.cases(sizes.model, count)),
        *(it for count in single for it in adapters.cases(sizes.model, count)),
        *(it for count in single for it in encoders.cases(sizes.encoder, count)),
        *(it for count in single for it in decode.cases(sizes.decode, count)),
        *loading.cases(sizes.loading, threads[-1]),
        # Last: it computes gradients in a thread of foo, whose OpenMP workers stay. With more
        # threads than processors OpenMP does not spin, and calls that take 160 us on two threads
        # take 250 from then on.
        device.training_case(threads[-1]),
        *device.sanitizer_cases(threads[-1]),
    ]


# ----------------------------------------------------------------------------------------- calls


def call_cases() -> Iterator[Case]:
    """Measure the cost of a call with next to nothing to compute."""
    variants: dict[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
        "abs, no gradient needed": (False, nullcontext),
        "abs, under no_grad": (False, torch.no_grad),
        "abs, gradient needed": (True, nullcontext),
    }
    for name, (requires_grad, context) in variants.items():
        prepare = partial(prepare_calls, requires_grad)
        yield Case("calls", name, prepare, context=context, headline=True)
    name = "abs, gradient needed, and its backward pass"
    yield Case("calls", name, prepare_backward_calls, headline=True)
    for what, is_backward in {"gradient needed": False, "its backward pass": True}.items():
        name = f"abs with a formula in Python, {what}"
        yield Case("calls", name, partial(prepare_formulas, is_backward), headline=True)
    yield Case("calls", "relu, made with numba_op", prepare_kit_relu, headline=True)
    yield Case("calls", "sum of a row, made with tile_kernel", prepare_kit_sum, headline=True)


def prepare_kit_relu() -> Contenders:
    input = torch.randn(8)
    ours, theirs = partial(kit.relu(), input), partial(torch.relu, input)
    return local_contenders(ours, theirs, partial(torch.ops.aten.relu.default, input))


def prepare_kit_sum() -> Contenders:
    input = torch.randn(1, 8)
    ours, theirs = partial(kit.row_sum(), input), partial(torch.sum, input, -1)
    return local_contenders(ours, theirs, partial(torch.ops.aten.sum.dim_IntList, input, [-1]))


def prepare_calls(requires_grad: bool) -> Contenders:
    input = torch.randn(8, requires_grad=requires_grad)
    ours, theirs = partial(torch.ops.foo.abs.default, input), partial(torch.abs, input)
    return local_contenders(ours, theirs, partial(torch.ops.aten.abs.default, input))


def prepare_backward_calls() -> Contenders:
    """Call and differentiate operators, also one made with torch.library from Python functions."""
    input, cotangent = torch.randn(8, requires_grad=True), torch.ones(8)

    def differentiated(operator: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(operator(input), input, cotangent)[0]

    contenders = local_contenders(
        differentiated(torch.ops.foo.abs.default),
        differentiated(torch.abs),
        differentiated(torch.ops.aten.abs.default),
    )
    custom = partial(Local, differentiated(kit.custom_abs()))
    return {**contenders, "torch.library.custom_op": custom}


def prepare_formulas(is_backward: bool) -> Contenders:
    """Record a formula in Python, or run its backward pass, by the kit and by torch.library."""
    input, cotangent = torch.randn(8, requires_grad=True), torch.ones(8)

    def prepare(operator: Callable[[torch.Tensor], torch.Tensor]) -> Local:
        if not is_backward:
            return Local(partial(operator, input))
        output = operator(input)
        return Local(partial(torch.autograd.grad, output, input, cotangent, retain_graph=True))

    return {
        OURS: lambda: prepare(kit.formula_abs()),
        "torch": lambda: prepare(torch.abs),
        "torch.library": lambda: prepare(kit.torch_formula_abs()),
        "torch.library.custom_op": lambda: prepare(kit.custom_abs()),
    }


def local_contenders(
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    same_way_in: Callable[[], Any] | None = None,
) -> Contenders:
    """Make contenders in this process.

    ``same_way_in`` calls theirs through torch.ops, as ours, and not through Python's own function.
    """
    contenders = {OURS: ours, "torch": theirs}
    if same_way_in is not None:
        contenders["torch.ops.aten"] = same_way_in
    return {name: partial(Local, function) for name, function in contenders.items()}


# ------------------------------------------------------------------------------------------- abs


def abs_cases(sizes: Iterable[int], threads: int) -> Iterator[Case]:
    """Measure the elementwise launcher, from and to memory; on foo against torch.abs on cpu."""
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            moved = size * (dtype.itemsize + dtype.to_real().itemsize)
            for form, prepare in {
                "": partial(prepare_abs, dtype, size, "cpu"),
                ", out=": partial(prepare_abs_out, dtype, size),
                ", on foo": partial(prepare_abs, dtype, size, "foo"),
            }.items():
                name = f"abs, {dtype_name(dtype)}, 2^{size.bit_length() - 1} elements{form}"
                headline = dtype is torch.float32 and size == max(sizes)
                yield Case("abs", name, prepare, (threads,), work=moved, headline=headline)


def prepare_abs(dtype: torch.dtype, size: int, device: str) -> Contenders:
    input = torch.randn(size, dtype=dtype)
    ours = partial(torch.ops.foo.abs.default, input.to(device))
    return local_contenders(ours, partial(torch.abs, input))


def prepare_abs_out(dtype: torch.dtype, size: int) -> Contenders:
    input = torch.randn(size, dtype=dtype)
    ours, theirs = (torch.empty(size, dtype=dtype.to_real()) for _ in range(2))
    return local_contenders(
        partial(torch.ops.foo.abs.out, input, out=ours), partial(torch.abs, input, out=theirs)
    )


# ------------------------------------------------------------------------------------- attention


def square_workloads(sizes: Sizes) -> Iterator[Workload]:
    """Vary the length, with as many queries as keys."""
    for direction in DIRECTIONS:
        for dtype in sizes.dtypes:
            for is_causal in (False, True):
                for head_dim in sizes.head_dims:
                    for length in sizes.lengths:
                        yield Workload(direction, dtype, is_causal, length, length, head_dim)


def single_head_workloads(sizes: Sizes) -> Iterator[Workload]:
    """Use one head of one sequence, which two threads must share."""
    length = sizes.single_head
    for direction in DIRECTIONS:
        for dtype in FEW_DTYPES:
            yield Workload(direction, dtype, False, length, length, 64, query_heads=1, key_heads=1)


def shared_workloads(sizes: Sizes) -> Iterator[Workload]:
    """Use 32 query heads that share 8 of key and value."""
    length = sizes.shared
    for direction in DIRECTIONS:
        for dtype in FEW_DTYPES:
            yield Workload(direction, dtype, True, length, length, 128, query_heads=32)


def option_workloads(sizes: Sizes) -> Iterator[Workload]:
    """Yield a workload for each of `OPTIONS`."""
    length = sizes.options
    for options in OPTIONS:
        for direction in DIRECTIONS:
            for dtype in FEW_DTYPES:
                dense = Workload(direction, dtype, False, length, length, HEADLINE_HEAD_DIM)
                yield replace(dense, **options)


def decoding_workloads(sizes: Sizes) -> Iterator[Workload]:
    """Use one query, and several caches in memory, like those of a model's layers."""
    for dtype in FEW_DTYPES:
        for length in sizes.caches:
            workload = Workload("forward", dtype, False, 1, length, 128, query_heads=32)
            copies = -(-peaks.bytes_beyond_the_caches() // workload.cache_bytes())
            yield replace(workload, copies=copies)


def attention_case(workload: Workload, threads: tuple[int, ...]) -> Case:
    references = peaks.references(peaks.compute_peak(workload.dtype))
    if workload.dtype == "float16" and not workload.is_backward:
        references[FLOAT32] = float32_rate(workload)
    parts = [workload.dtype, workload.mask, heads(workload), f"S {workload.query_length}"]
    section = f"attention {workload.direction}"
    if not workload.has_no_options:
        parts = [workload.option, workload.direction, *parts]
        section = "attention options"
    return Case(
        section,
        ", ".join(parts),
        partial(attention.contenders, workload),
        threads,
        workload.flops(),
        references=references,
        workload=workload,
        headline=is_headline(workload),
    )


def heads(workload: Workload) -> str:
    """Write heads and their dimension: ``8 x 64``, or ``32/8 x 128`` with shared keys."""
    return f"{workload.heads} x {workload.head_dims}"


def is_headline(workload: Workload) -> bool:
    if not workload.has_no_options:
        return workload.dtype == "bfloat16"
    if workload.query_heads == 32:
        return True
    small = workload.query_length == SHORT_LENGTH and not workload.is_causal
    is_long = workload.query_length == HEADLINE_LENGTH
    shown = is_long or (small and not workload.is_backward)
    return shown and workload.head_dim == HEADLINE_HEAD_DIM


def decoding_case(workload: Workload, threads: tuple[int, ...]) -> Case:
    return Case(
        "attention decoding",
        f"{workload.dtype}, {heads(workload)}, {workload.key_length} keys",
        partial(attention.contenders, workload),
        threads,
        workload.cache_bytes(),
        references=peaks.references(peaks.READ),
        workload=workload,
        headline=workload.key_length == DECODING_LENGTH,
    )


def float32_rate(workload: Workload) -> Reference:
    """Return our rate for the same workload in float32."""

    @cache
    def ready(threads: int) -> tuple[Local, int]:
        contender = attention.ours(replace(workload, dtype="float32"))
        return contender, calls_per_turn(contender, threads, peaks.SECONDS)[0]

    def rate(threads: int) -> float:
        contender, calls = ready(threads)
        return workload.flops() * calls / contender.time(calls, threads)

    return rate
