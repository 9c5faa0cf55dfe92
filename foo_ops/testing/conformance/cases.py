"""Compares each operator, module and optimizer in torch's own tables with the CPU."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from foo_ops.compat import common_cuda, default_tolerances, pytree
from foo_ops.testing.conformance.comparison import (
    UNINITIALIZED,
    agree,
    begin,
    check_announced,
    compare,
    is_there,
    leaf,
    map_sample,
    mapper,
    outcome,
    sample_there,
    to_channels_last,
    to_device,
)

# -------------------------------------------------- PyTorch's table of operators, and their samples


# op_db omits what this machine's GPU cannot do. It shall list everything that CUDA can, so that the
# cases do not depend on the machine. module_db imports op_db, and so comes later, too.
for _name in list(vars(common_cuda)):
    if _name.startswith("PLATFORM_SUPPORTS_") or (
        _name.startswith("SM") and _name.endswith("OrLater")
    ):
        setattr(common_cuda, _name, True)

from foo_ops.compat import SampleInput, module_db, op_db, optim_db  # noqa: E402

# Samples to run per operator and dtype, evenly chosen.
MAX_SAMPLES = 6


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATORS = {name_of(op): op for op in op_db}


def dtypes_of_cuda(op: Any) -> list[torch.dtype]:
    """Return the dtypes, forward or backward, that PyTorch lists for CUDA but not for the CPU."""
    forward = set(op.dtypesIfCUDA) - set(op.dtypes)
    backward = set(op.backward_dtypesIfCUDA) - set(op.backward_dtypes)
    return sorted(forward | backward, key=str)


def evenly(items: Iterator[Any], count: int = MAX_SAMPLES) -> list[Any]:
    first = list(itertools.islice(items, 200))
    return first[:: max(1, -(-len(first) // count))]


def call_of(op: Any, sample: Any, **options: Any) -> Callable[[], Any]:
    return lambda: op(sample.input, *sample.args, **sample.kwargs, **options)


def leaves_of(sample: Any) -> list[Any]:
    return pytree.tree_leaves((sample.input, sample.args, sample.kwargs))


def is_about_a_device(sample: Any) -> bool:
    """Return whether it contains a device or a tensor; torch.arange(3) always runs on the CPU."""
    kinds = (torch.Tensor, torch.device, torch.Generator)
    return any(isinstance(leaf, kinds) or leaf == "cpu" for leaf in leaves_of(sample))


def is_strided(sample: Any) -> bool:
    tensors = [leaf for leaf in leaves_of(sample) if isinstance(leaf, torch.Tensor)]
    return all(each.layout == torch.strided for each in tensors)


def inputs_with_gradient(sample: Any) -> list[torch.Tensor]:
    leaves = leaves_of(sample)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def differentiable(results: Any) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(results)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]


def weights_of(result: torch.Tensor) -> torch.Tensor:
    """Return weights for a gradient. They differ, as some gradients only show up in differences."""
    numbers = torch.linspace(0.5, 1.5, max(result.numel(), 1), dtype=torch.float64)
    return numbers[: result.numel()].view(result.shape).to(result.dtype).to(result.device)


# ------------------------------------------------------------------------------------- wider dtypes

# Dtypes that an operator supports on CUDA but not on the CPU: compared with the CPU in a wider
# dtype.


WIDER = {
    torch.bool: torch.uint8,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
    torch.bfloat16: torch.float64,
    torch.float16: torch.float64,
    torch.float32: torch.float64,
}
# The CPU supports it under the name of another variant.
AS_ON_CPU = {"nn.functional.batch_norm.without_cudnn"}

# The CPU draws other random numbers in float64.
DRAWS_IN_FLOAT32 = {"nn.functional.rrelu"}

# The CPU has no kernel for these in any dtype; tests/device compares their values.
ON_CUDA_ALONE = {
    "torch.ops.aten._efficient_attention_forward",
    "torch.ops.aten._flash_attention_forward",
}

# In units of the largest element's last place: gradients consist of several operators, each of
# which rounds.
ALLOWED_ROUNDINGS = 8


def _without_nan(self: torch.Tensor) -> torch.Tensor:
    return torch.where(self.isnan(), 0, self)


def _nansum(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.sum(_without_nan(self), *args, **kwargs)


def _nanmean(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    counts = torch.sum(~self.isnan(), *args, **{**kwargs, "dtype": None})
    return torch.sum(_without_nan(self), *args, **kwargs) / counts


def _histc(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(self.double(), *args, **kwargs)


# The CPU has no kernel for complex numbers, or for integers, in any width.
FORMULAS: dict[str, Callable[..., Any]] = {
    "histc": _histc,
    "nanmean": _nanmean,
    "nansum": _nansum,
}


def check_in_wider_dtype(
    op: Any, sample: Any, dtype: torch.dtype, what: str, gradients: bool
) -> None:
    sample = map_sample(mapper(leaf), sample)
    there = sample_there(op, sample)
    name = name_of(op)
    actual, error = outcome(call_of(op, there))
    if name in ON_CUDA_ALONE:
        if error is not None:
            raise AssertionError(f"{what}: raises {error!r}") from error
        _check_announced(op, there, actual, what)
        return
    wide = sample if name in AS_ON_CPU else _widened(sample, name in DRAWS_IN_FLOAT32)
    expected, expected_error = outcome(call_of(FORMULAS.get(op.name, op), wide))
    if expected_error is not None:
        assert error is not None, f"{what}: only the cpu raises {expected_error!r}"
        return
    if error is not None:
        raise AssertionError(f"{what}: raises {error!r}") from error
    _compare(actual, expected, what)
    _check_announced(op, there, actual, what)
    _check_variants(op, there, actual, what)
    if gradients:
        actual = there.output_process_fn_grad(actual)
        _check_wider_gradients(actual, sample.output_process_fn_grad(expected), there, wide, what)


def _widened(sample: SampleInput, to_float32: bool) -> SampleInput:
    def wide(dtype: torch.dtype) -> torch.dtype:
        if to_float32 and dtype.is_floating_point:
            return torch.float32
        return WIDER.get(dtype, dtype)

    def widen(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return wide(value)
        if not isinstance(value, torch.Tensor):
            return copy.copy(value)
        return value.detach().to(wide(value.dtype)).requires_grad_(value.requires_grad)

    return map_sample(mapper(widen), sample)


def _compare(actual: Any, expected: Any, what: str) -> None:
    actual_leaves, expected_leaves = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(actual_leaves) == len(expected_leaves), f"{what}: other number of results"
    for one, other in zip(actual_leaves, expected_leaves):
        if isinstance(other, torch.Tensor):
            assert is_there(one), f"{what}: result on {one.device}"
            assert one.requires_grad == other.requires_grad, f"{what}: requires_grad"
            _compare_tensors(one.detach().cpu(), other.detach(), what)


def _compare_tensors(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    if actual.layout != torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    rounded = expected.to(actual.dtype)
    options: dict[str, Any] = {}
    if actual.is_floating_point() or actual.is_complex():
        finite = rounded[rounded.isfinite()]
        largest = finite.to(expected.dtype).abs().max().item() if finite.numel() else 0.0
        rtol, atol = default_tolerances(actual.dtype)
        rounding = torch.finfo(actual.dtype).eps * largest
        options = {"rtol": rtol, "atol": max(atol, ALLOWED_ROUNDINGS * rounding)}
    if actual.is_complex():
        # Complex infinities have several forms, and assert_close does not support complex half.
        wanted = rounded.isfinite()
        actual, rounded = (each.to(torch.complex128)[wanted] for each in (actual, rounded))
    torch.testing.assert_close(
        actual, rounded, equal_nan=True, **options, msg=lambda message: f"{what}: {message}"
    )


def _check_announced(op: Any, there: SampleInput, result: Any, what: str) -> None:
    check_announced(result, lambda to_fake: call_of(op, map_sample(mapper(to_fake), there)), what)


def _check_variants(op: Any, there: SampleInput, result: Any, what: str) -> None:
    """Check that the ``out=`` and in-place variants give the same values."""
    there = map_sample(
        mapper(lambda each: each.detach() if isinstance(each, torch.Tensor) else each), there
    )
    if op.supports_out and is_strided(there):
        for make in (torch.zeros_like, lambda each: each.new_empty(0)):
            out = pytree.tree_map(make, result)
            written = call_of(op, there, out=out)()
            for one, other, expected in zip(*map(pytree.tree_leaves, (written, out, result))):
                assert one is other, f"{what}, out=: another tensor comes back"
                _assert_equal(one, expected, f"{what}, out=")
    in_place = op.get_inplace()
    if in_place is None or there.broadcasts_input or not isinstance(result, torch.Tensor):
        return
    target = there.input.clone()
    if target.dtype != result.dtype:
        return
    written = in_place(target, *there.args, **there.kwargs)
    assert written is target, f"{what}, in place: another tensor comes back"
    _assert_equal(written, result, f"{what}, in place")


def _assert_equal(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape} not {expected.shape}"
    equal = (actual == expected) | ((actual != actual) & (expected != expected))
    assert equal.all(), f"{what}: other values"


def _check_wider_gradients(
    actual: Any, expected: Any, there: SampleInput, wide: SampleInput, what: str
) -> None:
    outputs, expected_outputs = differentiable(actual), differentiable(expected)
    inputs, wide_inputs = inputs_with_gradient(there), inputs_with_gradient(wide)
    if not expected_outputs or not wide_inputs:
        return
    weights = [weights_of(each.detach()) for each in outputs]
    wide_weights = [weight.cpu().to(each.dtype) for weight, each in zip(weights, expected_outputs)]
    _compare(
        torch.autograd.grad(outputs, inputs, weights, allow_unused=True),
        torch.autograd.grad(expected_outputs, wide_inputs, wide_weights, allow_unused=True),
        f"{what}, gradient",
    )


# -------------------------------------------------------------------------------- compiled programs

# Check that torch.compile supports an operator on a device where it does on the CPU.


# Dynamo, Inductor's decompositions and partitioner, but no C++ compiler: a hundredth of the time.
# Inductor's code is the same for both devices.
BACKEND = "aot_eager_decomp_partition"


def _compiled(op: Any, sample: Any) -> Callable[[], Any]:
    torch.compiler.reset()
    function = torch.compile(op.op, backend=BACKEND, fullgraph=True)
    return lambda: function(sample.input, *sample.args, **sample.kwargs)


def check_compiled(op: Any, there: Any, sample: Any, what: str, *, values: bool) -> None:
    """Compare a compiled sample on the device with that on the CPU; both may raise."""
    agree(_compiled(op, there), _compiled(op, sample), what, values=values)


# -------------------------------------------------------------------------------------------- cases

# A case is a suite, a name and a dtype. Running it raises at the first difference.


GRADIENT_DTYPES = (torch.float32, torch.float64, torch.complex64)
OPTIMIZER_STEPS = 3


class Case(NamedTuple):
    suite: str
    name: str
    dtype: str


def all_cases() -> list[Case]:
    cases = [
        Case("operators", name_of(op), str(dtype).removeprefix("torch."))
        for op in op_db
        for dtype in sorted(op.supported_dtypes("cpu"), key=str)
    ]
    cases += [
        Case(suite, name_of(op), str(dtype).removeprefix("torch."))
        for suite in ("strides", "devices", "compiled")
        for op in op_db
        for dtype in _one_dtype(op)
    ]
    cases += [
        Case("dtypes", name_of(op), str(dtype).removeprefix("torch."))
        for op in op_db
        for dtype in dtypes_of_cuda(op)
    ]
    cases += [
        Case("modules", info.name, str(dtype).removeprefix("torch."))
        for info in module_db
        for dtype in info.supported_dtypes("cpu")
    ]
    cases += [Case("optimizers", _class_name(info), "float32") for info in optim_db]
    return cases


def run(case: Case) -> None:
    """Run a case; raise an AssertionError if the device differs from the CPU, or its own error."""
    begin(case.name)
    dtype = getattr(torch, case.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _RUNNERS[case.suite](case.name, dtype)


def _class_name(info: Any) -> str:
    return info.optim_cls.__name__


_MODULES = {info.name: info for info in module_db}

_OPTIMIZERS = {_class_name(info): info for info in optim_db}


def _run_operator(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    gradients = dtype in GRADIENT_DTYPES and op.supports_autograd
    torch.manual_seed(0)
    samples = filter(is_about_a_device, op.sample_inputs("cpu", dtype, requires_grad=gradients))
    for position, sample in enumerate(evenly(samples)):
        what = f"sample {position}"
        values = name not in UNINITIALIZED and not _drops(name, sample)
        _check_sample(op, sample, what, gradients, values)
        if position == 0 and is_strided(sample):
            _check_sample(op, sample.noncontiguous(), f"{what}, strided", gradients, values)
        if position < 2:
            _check_out(op, sample, f"{what}, out=", values)
            _check_in_place(op, sample, f"{what}, in place", values)


def _one_dtype(op: Any) -> list[torch.dtype]:
    """Choose one dtype, if there is any, for checks that do not depend on it."""
    dtypes = sorted(
        op.supported_dtypes("cpu"), key=lambda dtype: (dtype != torch.float32, str(dtype))
    )
    return dtypes[:1]


def _run_strides(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    torch.manual_seed(0)
    samples = evenly(filter(is_about_a_device, op.sample_inputs("cpu", dtype)))
    named = [(f"sample {position}", sample) for position, sample in enumerate(samples)]
    if samples and is_strided(samples[0]):
        named.append(("sample 0, strided", samples[0].noncontiguous()))
        named.append(("sample 0, channels_last", map_sample(mapper(to_channels_last), samples[0])))
    for what, sample in named:
        _check_strides(op, sample, what)


def _check_strides(op: Any, sample: Any, what: str) -> None:
    there = sample_there(op, sample)
    results = agree(call_of(op, there), call_of(op, sample), what, values=False)
    if results is not None:
        check_announced(
            results[0], lambda to_fake: call_of(op, map_sample(mapper(to_fake), there)), what
        )


def _run_devices(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    torch.manual_seed(0)
    samples = filter(is_about_a_device, op.sample_inputs("cpu", dtype))
    for position, sample in enumerate(evenly(samples)):
        _check_mixed_devices(op, sample_there(op, sample), f"sample {position}")


def _run_compiled(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    torch.manual_seed(0)
    samples = filter(is_about_a_device, op.sample_inputs("cpu", dtype))
    for sample in itertools.islice(samples, 1):
        values = name not in UNINITIALIZED and not _drops(name, sample)
        check_compiled(op, sample_there(op, sample), sample, "sample 0", values=values)


def _run_dtypes(name: str, dtype: torch.dtype) -> None:
    op = OPERATORS[name]
    gradients = dtype in op.backward_dtypesIfCUDA and op.supports_autograd
    gradients &= dtype.is_floating_point or dtype.is_complex
    torch.manual_seed(0)
    samples = filter(is_about_a_device, op.sample_inputs("cpu", dtype, requires_grad=gradients))
    for position, sample in enumerate(evenly(samples)):
        what = f"sample {position}"
        check_in_wider_dtype(op, sample, dtype, what, gradients)
        if position == 0 and is_strided(sample):
            check_in_wider_dtype(op, sample.noncontiguous(), dtype, f"{what}, strided", gradients)


def _with_one_on_cpu(sample: Any, moved: torch.Tensor) -> SampleInput:
    return map_sample(mapper(lambda each: each.cpu() if each is moved else each), sample)


def _check_mixed_devices(op: Any, sample: Any, what: str) -> None:
    """Put one tensor at a time on the CPU, the others on the device, which must raise."""
    there = [leaf for leaf in leaves_of(sample) if is_there(leaf)]
    tensors = list({id(tensor): tensor for tensor in there}.values())
    is_empty = any(tensor.numel() == 0 for tensor in tensors)
    if len(tensors) < 2 or is_empty or outcome(call_of(op, sample))[1] is not None:
        return
    for position, moved in enumerate(tensors):
        if moved.dim() == 0:  # numbers may be on the CPU
            continue
        error = outcome(call_of(op, _with_one_on_cpu(sample, moved)))[1]
        assert error is not None, f"{what}: tensor {position} of {len(tensors)} may be on the CPU"
        assert re.search("[Dd]evice|type", str(error)), f"{what}: tensor {position}: {error}"


def _drops(name: str, sample: Any) -> bool:
    """Return whether attention uses dropout, whose mask each device draws for itself."""
    is_attention = name == "nn.functional.scaled_dot_product_attention"
    return is_attention and sample.kwargs.get("dropout_p", 0) > 0


def _check_sample(op: Any, sample: Any, what: str, gradients: bool, values: bool) -> None:
    sample = map_sample(mapper(leaf), sample)
    there = sample_there(op, sample)
    results = agree(call_of(op, there), call_of(op, sample), what, values=values)
    if results is None or not gradients or not values:
        return
    actual, expected = (
        each.output_process_fn_grad(result) for each, result in zip((there, sample), results)
    )
    _check_gradients(
        actual, expected, inputs_with_gradient(there), inputs_with_gradient(sample), what
    )


def _check_gradients(
    actual: Any,
    expected: Any,
    there_inputs: list[Any],
    cpu_inputs: list[Any],
    what: str,
    exact: Callable[[], tuple[Any, list[Any]]] | None = None,
) -> None:
    """Compare gradients. ``exact`` returns results in float64, and the inputs that they are of."""

    def gradients(results: Any, inputs: list[Any]) -> list[Any]:
        outputs = differentiable(results)
        weights = [weights_of(each) for each in outputs]
        return list(torch.autograd.grad(outputs, inputs, weights, allow_unused=True))

    if not differentiable(expected) or not cpu_inputs:
        return
    agree(
        lambda: gradients(actual, there_inputs),
        lambda: gradients(expected, cpu_inputs),
        f"{what}, gradient",
        exact=None if exact is None else lambda: gradients(*exact()),
    )


def _detached(sample: Any) -> Any:
    return sample.transform(lambda each: each.detach() if isinstance(each, torch.Tensor) else each)


def _check_out(op: Any, sample: Any, what: str, values: bool) -> None:
    if not op.supports_out:
        return
    sample = _detached(sample)
    expected, error = outcome(call_of(op, sample))
    if error is not None or not all(
        isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided
        for leaf in pytree.tree_leaves(expected)
    ):
        return

    def call(sample: Any, out: Any) -> Callable[[], Any]:
        return lambda: (op(sample.input, *sample.args, **sample.kwargs, out=out), out)

    def fresh(size_matches: bool) -> Any:
        make = torch.zeros_like if size_matches else lambda each: each.new_empty(0)
        return pytree.tree_map(make, expected)

    there = sample_there(op, sample)
    for size_matches in (True, False):
        cpu_out = fresh(size_matches)
        there_out = pytree.tree_map(to_device, fresh(size_matches))
        results = agree(call(there, there_out), call(sample, cpu_out), what, values=values)
        if results is not None:
            (there_result, _), (cpu_result, _) = results
            for leaves in zip(
                *map(pytree.tree_leaves, (there_result, there_out, cpu_result, cpu_out))
            ):
                is_out = leaves[0] is leaves[1], leaves[2] is leaves[3]
                assert is_out[0] == is_out[1], f"{what}: another tensor comes back"


def _check_in_place(op: Any, sample: Any, what: str, values: bool) -> None:
    in_place = op.get_inplace()
    if in_place is None or sample.broadcasts_input:
        return
    sample = _detached(sample)

    def call(sample: Any) -> Callable[[], Any]:
        target = pytree.tree_map(
            lambda each: each.clone() if isinstance(each, torch.Tensor) else each, sample.input
        )
        return lambda: (in_place(target, *sample.args, **sample.kwargs), target)

    agree(call(sample_there(op, sample)), call(sample), what, values=values)


def _run_module(name: str, dtype: torch.dtype) -> None:
    info = _MODULES[name]
    for training in (True, False):
        torch.manual_seed(0)
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=dtype, requires_grad=True, training=training
        )
        for position, each in enumerate(inputs):
            if each.forward_input is not None:
                _check_module(info, each, dtype, training, f"input {position} {training=}")


def _in_float64(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _check_module(info: Any, each: Any, dtype: torch.dtype, training: bool, what: str) -> None:
    constructor, forward = each.constructor_input, each.forward_input
    kwargs = {"device": "cpu", "dtype": dtype}
    try:
        module = info.module_cls(*constructor.args, **constructor.kwargs, **kwargs)
    except TypeError:  # a module without parameters may have no such argument
        module = info.module_cls(*constructor.args, **constructor.kwargs).to(dtype)
    module.train(training)
    if info.is_lazy:  # the first call creates its parameters
        module(*forward.args, **forward.kwargs)
    # The forward pass may change buffers.
    there, wide = to_device(copy.deepcopy(module)), copy.deepcopy(module).double()
    there_args, there_kwargs = pytree.tree_map(mapper(to_device), (forward.args, forward.kwargs))

    def leaves(args: Any, module: torch.nn.Module) -> list[torch.Tensor]:
        tensors = [
            leaf
            for leaf in pytree.tree_leaves(args)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        return tensors + [each for each in module.parameters() if each.requires_grad]

    def exact() -> tuple[Any, list[torch.Tensor]]:
        own, given = copy.deepcopy(wide), (forward.args, forward.kwargs)
        args, kwargs = pytree.tree_map(mapper(_in_float64), given)
        return own(*args, **kwargs), leaves((args, kwargs), own)

    results = agree(
        lambda: there(*there_args, **there_kwargs),
        lambda: module(*forward.args, **forward.kwargs),
        what,
        exact=lambda: exact()[0],
    )
    if results is None:
        return
    actual, expected = results
    _check_gradients(
        actual, expected, leaves((there_args, there_kwargs), there),
        leaves((forward.args, forward.kwargs), module), what, exact,
    )  # fmt: skip
    compare(there.state_dict(), module.state_dict(), f"{what}, state")


def _run_optimizer(name: str, dtype: torch.dtype) -> None:
    info = _OPTIMIZERS[name]
    implementations: list[dict[str, bool]] = [{}]
    implementations += [
        {flag: True} for flag in ("foreach", "fused") if flag in info.supported_impls
    ]
    if "foreach" in info.supported_impls:
        implementations.append({"foreach": False})
    for each in info.optim_inputs_func(device="cpu"):
        for flags in implementations:
            _check_optimizer(info, each.kwargs | flags, f"{each.desc} {flags}")


def _check_optimizer(info: Any, kwargs: dict[str, Any], what: str) -> None:
    torch.manual_seed(0)
    shapes = ((4, 3), (5, 2), (2, 2, 3))
    cpu = [torch.rand(shape).requires_grad_() for shape in shapes]
    there = [to_device(each) for each in cpu]
    gradients = [[torch.rand(shape) for shape in shapes] for _ in range(OPTIMIZER_STEPS)]

    def train(parameters: list[torch.Tensor]) -> Callable[[], Any]:
        def steps() -> Any:
            optimizer = info.optim_cls(parameters, **kwargs)
            for step in gradients:
                for parameter, gradient in zip(parameters, step):
                    gradient = gradient.to(parameter.device)
                    parameter.grad = (
                        gradient.to_sparse() if info.only_supports_sparse_grads else gradient
                    )
                optimizer.step(lambda: sum((each**2).sum() for each in parameters))
                # Saving and loading in between changes nothing.
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            return parameters

        return steps

    if _class_name(info) == "Muon":
        cpu, there = cpu[:2], there[:2]
    assert agree(train(there), train(cpu), what) is not None, f"{what}: both raise"


_RUNNERS: dict[str, Callable[[str, torch.dtype], None]] = {
    "operators": _run_operator,
    "strides": _run_strides,
    "devices": _run_devices,
    "compiled": _run_compiled,
    "dtypes": _run_dtypes,
    "modules": _run_module,
    "optimizers": _run_optimizer,
}
