"""check_operator finds what is wrong with an operator, and says it: one broken operator each."""

import dataclasses
import itertools
import re
from collections.abc import Callable

import pytest
import torch

from foo_ops.testing import (
    CHECKS,
    OperatorCheckError,
    OpSpec,
    Sample,
    cases,
    check_operator,
    random,
)

NAMES = map("op{}".format, itertools.count())
PRODUCT = "(Tensor a, Tensor b) -> Tensor"
FLOATS = (torch.float32, torch.bfloat16, torch.float64)


def define(kernel, schema=PRODUCT, *, fake, name=None, tags=()):
    """A new operator in the namespace broken, with a kernel for both devices."""
    name = name or next(NAMES)
    torch.library.define(f"broken::{name}", schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    torch.library.impl(f"broken::{name}", ("cpu", "foo"), kernel)
    if fake is not None:
        torch.library.register_fake(f"broken::{name}", fake)
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.broken, packet), overload or "default")


def remember(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def product(a, b):
    """The right kernel: the results of any strides are contiguous."""
    return (a * b).contiguous()


def empty_product(a, b):
    return torch.empty(a.shape, dtype=a.dtype, device=a.device)


def product_backward(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b, grad * a


def pair(dtype, size):
    return Sample(tuple(random("pair", (size, 3), (size, 3), dtype=dtype)))


def spec_of(operator, **changes):
    attributes = {
        "operator": operator,
        "reference": torch.mul,
        "dtypes": FLOATS,
        "sized": pair,
        "sizes": (0, 7),
    }
    return OpSpec(**(attributes | changes))


def product_spec(kernel=product, *, fake=empty_product, backward=product_backward, **changes):
    """Of a * b, which is broken where something else is given."""
    operator = define(kernel, fake=fake)
    if backward is not None:
        torch.library.register_autograd(operator, backward, setup_context=remember)
    return spec_of(operator, **({"differentiable": backward is not None} | changes))


def failures_of(spec, checks=None):
    """The messages, by the ids of the cases that fail."""
    with pytest.raises(OperatorCheckError) as caught:
        check_operator(spec, checks=checks)
    return {case.id: str(error) for case, error in caught.value.failures}


# ------------------------------------------------------------------------------- broken products


def without_last(a, b):
    result = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    result.view(-1)[:-1] = (a * b).view(-1)[:-1]
    return result


def added_to_fresh_memory(a, b):
    return torch.empty(a.shape, dtype=a.dtype, device=a.device).add_(a * b)


def ignoring_strides(a, b):
    first, second = (torch.as_strided(t, t.shape, (3, 1)) for t in (a, b))
    return first * second


def ignoring_offset(a, b):
    return product(*(torch.as_strided(t, t.shape, t.stride(), 0) for t in (a, b)))


def multiples_of_four(a, b):
    result = torch.zeros(a.shape, dtype=a.dtype, device=a.device)
    count = a.numel() // 4 * 4
    result.view(-1)[:count] = (a * b).view(-1)[:count]
    return result


def refusing_empty(a, b):
    if a.numel() == 0:
        raise ValueError("a must not be empty")
    return product(a, b)


def refusing_bfloat16(a, b):
    if a.dtype == torch.bfloat16:
        raise TypeError("a must be float32 or float64, got torch.bfloat16")
    return product(a, b)


def writing_b(a, b):
    result = product(a, b)
    b.zero_()
    return result


def writing_beside_a(a, b):
    if a.storage_offset() > 0:
        torch.as_strided(a, (1,), (1,), 0).fill_(5)
    return product(a, b)


def aliasing(a, b):
    return a.mul_(b)


def on_cpu(a, b):
    return product(a, b).cpu()


def wrong_backward(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b, grad * a * 2


def forgetful_backward(ctx, grad):
    return grad * ctx.saved_tensors[1], None


def raising_backward(ctx, grad):
    raise RuntimeError("no such formula")


def backward_of_dense_gradients(ctx, grad):
    dense = torch.as_strided(grad, grad.shape, (3, 1), 0)
    return product_backward(ctx, dense)


def backward_that_asks_who_needs_it(ctx, grad):
    grad_a, grad_b = product_backward(ctx, grad)
    return (grad_a, grad_b) if ctx.needs_input_grad[0] else (None, grad_b * 2)


def looking_at_data(a, b):
    return a.new_empty(a.shape) if a.sum().item() > 0 else b.new_empty(b.shape)


def specialised_on_a_size(a, b):
    # Asked of a symbolic size, this makes the graph valid for one size alone.
    return a.new_empty(int(a.shape[0]), 3)


def fake_of_dense_input(a, b):
    if not a.is_contiguous():
        raise ValueError("only dense input")
    return empty_product(a, b)


@dataclasses.dataclass
class Broken:
    """What is broken, the check that finds it, and what it says."""

    check: str
    message: str
    make: Callable = product
    fake: Callable | None = empty_product
    backward: Callable | None = product_backward


BROKEN = {
    "fake shape": Broken(
        "fake_kernel",
        r"the fake kernel gives output 0 the shape \(7, 4\), the kernel gives it \(7, 3\)",
        fake=lambda a, b: a.new_empty(a.shape[0], a.shape[1] + 1),
    ),
    "fake dtype": Broken(
        "fake_kernel",
        r"gives output 0 the dtype torch\.float32, the kernel gives it torch\.bfloat16",
        fake=lambda a, b: torch.empty(a.shape, device=a.device),
    ),
    "fake stride": Broken(
        "fake_kernel",
        r"gives output 0 the stride \(1, 7\), the kernel gives it \(3, 1\)",
        fake=lambda a, b: a.new_empty(a.shape[::-1]).t(),
    ),
    "fake stride of strided input": Broken(
        "fake_kernel_in_layouts",
        r"gives output 0 the stride \(1, 7\), the kernel gives it \(3, 1\)",
        fake=lambda a, b: torch.empty_like(a),
    ),
    "fake device": Broken(
        "fake_kernel",
        r"gives output 0 the device cpu, the kernel gives it foo:0",
        fake=lambda a, b: torch.empty(a.shape, dtype=a.dtype),
    ),
    "fake kernel raises": Broken(
        "fake_kernel",
        r"the fake kernel \(torch\.library\.register_fake\) raised ZeroDivisionError",
        fake=lambda a, b: 1 // 0,
    ),
    "no fake kernel": Broken(
        "fake_kernel", r"^there is no fake kernel: register one \(torch\.library", fake=None
    ),
    "fake kernel looks at data": Broken("compiled_graph", "torch.compile", fake=looking_at_data),
    "fake kernel of one size": Broken(
        "compiled_for_dynamic_shapes",
        "the graph that was compiled for size 9 does not serve size 6: the fake kernel",
        fake=specialised_on_a_size,
    ),
    "values": Broken(
        "values",
        r"output 0 is wrong in 2[01] of 21 elements; the worst, at \(\d, \d\), is \S+ instead of "
        r"\S+, where \S+ is allowed",
        make=lambda a, b: product(a, b) * 1.1,
    ),
    "an element not written": Broken(
        "values",
        r"wrong in 1 of 21 .* 1 of them are nan: memory that nobody has written is full of it",
        make=without_last,
    ),
    "fresh memory read": Broken(
        "values", r"21 of them are nan: .* or reads fresh memory", make=added_to_fresh_memory
    ),
    "strides ignored": Broken(
        "layouts",
        "The same numbers in contiguous tensors give the right result: the kernel, or its formula, "
        "does not follow the strides and the offset of reversed_dimensions",
        make=ignoring_strides,
    ),
    "strides of the gradient ignored": Broken(
        "layouts",
        "the gradient of a .* give the right result",
        backward=backward_of_dense_gradients,
    ),
    "offset ignored": Broken(
        "layouts", "strides and the offset of at_odd_offset", make=ignoring_offset
    ),
    "tail of a vector forgotten": Broken("values", "wrong in 1 of 21", make=multiples_of_four),
    "empty refused": Broken(
        "values",
        r"called with float32 \(0, 3\), float32 \(0, 3\) raised ValueError: a must not be empty",
        make=refusing_empty,
    ),
    "dtype refused": Broken(
        "values",
        "whose OpSpec promises bfloat16 on foo, called with .* raised TypeError: a must be float32",
        make=refusing_bfloat16,
    ),
    "device of an output": Broken(
        "values", "output 0 is on cpu, its inputs are on foo", make=on_cpu
    ),
    "argument written": Broken(
        "writes_only_what_is_declared",
        r"it writes its argument b, and its schema does not say so: .*\(Tensor a, Tensor b\)",
        make=writing_b,
    ),
    "memory beside an argument written": Broken(
        "writes_only_what_is_declared",
        "it writes to the memory of its argument a beside the elements that it got",
        make=writing_beside_a,
    ),
    "argument returned": Broken(
        "aliases_only_what_is_declared",
        "output 0 shares memory with its argument a, and its schema does not say so",
        make=aliasing,
    ),
    "gradient": Broken("gradients", "the gradient of b is wrong", backward=wrong_backward),
    "gradient, numerically": Broken(
        "gradcheck", "gradcheck raised .*Jacobian mismatch", backward=wrong_backward
    ),
    "gradient, compiled": Broken(
        "compiled_graph", "the gradient of b is wrong", backward=wrong_backward
    ),
    "gradient forgotten": Broken(
        "gradients", "the gradient of b is wrong", backward=forgetful_backward
    ),
    "gradient raises": Broken(
        "gradients",
        "the formula of its gradient raised RuntimeError: no such formula",
        backward=raising_backward,
    ),
    "gradient that nobody needs": Broken(
        "gradient_only_where_needed",
        "an output requires a gradient although no input does",
        make=lambda a, b: product(a, b).requires_grad_(),
    ),
    "index of a device": Broken(
        "second_device",
        "output 0 is on foo:0, its inputs are on foo:1",
        make=lambda a, b: product(a, b).to("foo:0"),
    ),
    "fake kernel wants dense input": Broken(
        "compiled_for_layouts", "torch.compile.* raised .*only dense", fake=fake_of_dense_input
    ),
    "gradient of one input alone": Broken(
        "gradient_of_each_input",
        "the gradient differs where b alone requires a gradient",
        backward=backward_that_asks_who_needs_it,
    ),
    "no formula": Broken(
        "gradients",
        r"there is no formula of its gradient: register one \(torch\.library\.register_autograd",
        backward=None,
    ),
    "opcheck": Broken("opcheck", "test_schema", make=writing_b),
}


def require_message(spec, check, message):
    messages = failures_of(spec, [check])
    assert any(re.search(message, text, re.DOTALL) for text in messages.values()), messages


@pytest.mark.parametrize("name", BROKEN)
def test_broken_operator_is_found(name):
    broken = BROKEN[name]
    spec = product_spec(
        broken.make, fake=broken.fake, backward=broken.backward, differentiable=True
    )
    if broken.check.startswith(("compiled", "opcheck")):
        spec = dataclasses.replace(spec, devices=("foo",), dtypes=(torch.float32,))
    require_message(spec, broken.check, broken.message)


# ------------------------------------------------------------------------------- other signatures


def scale_kernel(tensors, *, factor, offset=0):
    return [(tensor * factor + offset).contiguous() for tensor in tensors]


def scale_fake(tensors, *, factor, offset=0):
    return [tensor.new_empty(tensor.shape) for tensor in tensors]


def scale_setup(ctx, inputs, keyword_only_inputs, output):
    ctx.factor = keyword_only_inputs["factor"]


def scale_backward(ctx, grads):
    return [grad * ctx.factor for grad in grads]


def lists_spec(kernel=scale_kernel, fake=scale_fake):
    schema = "(Tensor[] tensors, *, float factor, int offset=0) -> Tensor[]"
    operator = define(kernel, schema, fake=fake)
    torch.library.register_autograd(operator, scale_backward, setup_context=scale_setup)

    def sized(dtype, size):
        return Sample((random("lists", (size,), (size, 2), dtype=dtype),), {"factor": 0.5})

    return spec_of(operator, reference=scale_kernel, sized=sized)


def largest(x):
    """The value is differentiable, the index is not."""
    values, indices = x.max(-1)
    return values.clone(), indices.clone()


def largest_fake(x):
    return x.new_empty(x.shape[:-1]), x.new_empty(x.shape[:-1], dtype=torch.int64)


def largest_setup(ctx, inputs, output):
    ctx.save_for_backward(output[1])
    ctx.shape = inputs[0].shape
    ctx.mark_non_differentiable(output[1])


def largest_backward(ctx, grad, _):
    (index,) = ctx.saved_tensors
    return grad.new_zeros(ctx.shape).scatter(-1, index.unsqueeze(-1), grad.unsqueeze(-1))


def outputs_spec(kernel=largest):
    operator = define(kernel, "(Tensor x) -> (Tensor, Tensor)", fake=largest_fake)
    torch.library.register_autograd(operator, largest_backward, setup_context=largest_setup)

    def sized(dtype, size):
        return Sample(tuple(random("largest", (size, 5), dtype=dtype)))

    return spec_of(operator, reference=lambda x: x.max(-1), sized=sized)


def both_spec(backward):
    """2 x and 3 x."""
    operator = define(
        lambda x: (x * 2, x * 3),
        "(Tensor x) -> (Tensor, Tensor)",
        fake=lambda x: (torch.empty_like(x), torch.empty_like(x)),
    )
    torch.library.register_autograd(operator, backward)

    def sized(dtype, size):
        return Sample(tuple(random("both", (size,), dtype=dtype)))

    return spec_of(operator, reference=lambda x: (x * 2, x * 3), sized=sized)


def positives(x):
    return x[x > 0]


def positives_fake(x):
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


def data_dependent_spec(kernel=positives, fake=positives_fake):
    operator = define(kernel, "(Tensor x) -> Tensor", fake=fake)

    def sized(dtype, size):
        return Sample(tuple(random("positives", (size,), dtype=dtype)))

    return spec_of(operator, reference=positives, sized=sized, differentiable=False)


def integers_spec():
    """Without a formula and without tolerances."""
    operator = define(product, fake=empty_product)
    samples = {"wrap": lambda dtype: Sample((torch.tensor([100, 7]).to(dtype),) * 2)}

    def sized(dtype, size):
        return Sample((torch.arange(size).to(dtype), torch.arange(size).to(dtype)))

    return spec_of(operator, dtypes=(torch.int64, torch.uint8), sized=sized, samples=samples)


def written(a, b):
    a.mul_(b)


def written_spec(kernel=written):
    """An operator that only writes an argument: it returns nothing."""
    operator = define(kernel, "(Tensor(a!) a, Tensor b) -> ()", fake=lambda a, b: None)
    return spec_of(operator, differentiable=False)


def in_place_spec(kernel=lambda a, b: a.mul_(b)):
    """a *= b"""
    schema = "(Tensor(a!) a, Tensor b) -> Tensor(a!)"
    operator = define(kernel, schema, fake=lambda a, b: a, tags=(torch.Tag.inplace,))
    return product_spec().variant(operator, differentiable=False)


def out_spec(kernel=lambda a, b, *, out: out.copy_(a * b)):
    """torch.mul(a, b, out=out)"""
    schema = "(Tensor a, Tensor b, *, Tensor(a!) out) -> Tensor(a!)"
    fake = lambda a, b, *, out: out  # noqa: E731
    operator = define(kernel, schema, fake=fake, name=f"{next(NAMES)}.out", tags=(torch.Tag.out,))
    return product_spec().variant(operator)


GOOD = {
    "one output": product_spec,
    "lists and keywords": lists_spec,
    "two outputs": outputs_spec,
    "a shape that depends on data": data_dependent_spec,
    "integers": integers_spec,
    "argument written": written_spec,
    "in place": in_place_spec,
    "out": out_spec,
}
COMPILED = [name for name in CHECKS if name.startswith("compiled")]


@pytest.mark.parametrize("name", GOOD)
def test_right_operator_passes(name):
    spec = GOOD[name]()
    check_operator(spec, checks=[check for check in CHECKS if check not in COMPILED])
    # Inductor, on the cpu, has its turn in tests/operators/test_matrix.py.
    of_foo = dataclasses.replace(spec, devices=("foo",), dtypes=spec.dtypes[:1])
    check_operator(of_foo, checks=COMPILED)


def scaled_in_common_memory(tensors, *, factor, offset=0):
    sizes = [tensor.numel() for tensor in tensors]
    common = torch.cat([tensor.flatten() for tensor in tensors]) * factor + offset
    return [part.view(tensor.shape) for part, tensor in zip(common.split(sizes), tensors)]


def not_written(a, b):
    pass


def returned_copy(a, b):
    return a.mul_(b).clone()


def second_written_too(a, b):
    a.mul_(b)
    b.zero_()


def out_moved(a, b, *, out):
    return out.set_(a * b)


def out_strides_ignored(a, b, *, out):
    torch.as_strided(out, out.shape, (3, 1)).copy_(a * b)
    return out


def depending_on_threads(a, b):
    return product(a, b) + torch.get_num_threads()


OTHERS_BROKEN = {
    "second tensor of a list written": (
        lambda: lists_spec(lambda tensors, *, factor, offset=0: [t.mul_(factor) for t in tensors]),
        "writes_only_what_is_declared",
        r"it writes its argument tensors\[0\], and its schema does not say so",
    ),
    "outputs in common memory": (
        lambda: lists_spec(scaled_in_common_memory),
        "aliases_only_what_is_declared",
        "output 0 shares memory with output 0",
    ),
    "fake kernel forgets a tensor": (
        lambda: lists_spec(fake=lambda tensors, **options: scale_fake(tensors, **options)[1:]),
        "fake_kernel",
        "the fake kernel returns 1 tensors, not 2",
    ),
    "gradient through the second output": (
        lambda: both_spec(lambda ctx, first, second: first * 2),
        "gradient_through_each_output",
        "the gradient of x is wrong in 7 of 7",
    ),
    "index": (
        lambda: outputs_spec(lambda x: (largest(x)[0], largest(x)[1] + 1)),
        "values",
        "output 1 is wrong in 7 of 7 elements",
    ),
    "size that a fake kernel knows": (
        lambda: data_dependent_spec(fake=lambda x: x.new_empty(2)),
        "fake_kernel",
        r"the fake kernel gives output 0 the shape \(2,\), the kernel gives it",
    ),
    "one element more": (
        lambda: data_dependent_spec(lambda x: torch.cat([positives(x), x.new_ones(1)])),
        "values",
        "output 0 has shape .*, that of the reference",
    ),
    "argument not written": (lambda: written_spec(not_written), "values", "output 0 is wrong"),
    "other argument written": (
        lambda: written_spec(second_written_too),
        "writes_only_what_is_declared",
        "it writes its argument b, and its schema does not say so",
    ),
    "copy returned in place": (
        lambda: in_place_spec(returned_copy),
        "aliases_only_what_is_declared",
        "output 0 must be its argument a itself, and is not",
    ),
    "out given other memory": (
        lambda: out_spec(out_moved),
        "out_in_layouts",
        "an out argument of the right shape and dtype was given other memory",
    ),
    "strides of out ignored": (
        lambda: out_spec(out_strides_ignored),
        "out_in_layouts",
        "output 0 is wrong in",
    ),
    "written beside out": (
        lambda: out_spec(out_strides_ignored),
        "writes_only_what_is_declared",
        "it writes to the memory of its argument out beside the elements that it got",
    ),
    "threads": (
        lambda: product_spec(depending_on_threads, large=lambda dtype: pair(dtype, 5)),
        "same_bits_for_any_number_of_threads",
        "2 threads give other results than 1",
    ),
    "number of outputs": (
        lambda: spec_of(product_spec().operator, reference=lambda a, b: (a * b, a)),
        "values",
        "it has 1 outputs, its reference 2",
    ),
    "reference without a history": (
        lambda: spec_of(product_spec().operator, reference=lambda a, b: (a * b).detach()),
        "gradients",
        "no output of the reference requires a gradient",
    ),
}


@pytest.mark.parametrize("name", OTHERS_BROKEN)
def test_broken_operator_of_another_signature_is_found(name):
    make, check, message = OTHERS_BROKEN[name]
    require_message(make(), check, message)


def test_tag_of_an_operator_that_returns_what_it_writes():
    schema = "(Tensor(a!) a, Tensor b) -> Tensor(a!)"
    operator = define(lambda a, b: a.mul_(b), schema, fake=lambda a, b: a)
    spec = product_spec().variant(operator, differentiable=False)
    hint = ". If it returns the argument that it writes, define it with tags=torch.Tag.inplace"
    for message in failures_of(spec, ["opcheck"]).values():
        assert message.endswith(hint)


# ------------------------------------------------------------------------- specs, cases, reports


def test_every_check_finds_something():
    """No check passes whatever it is given."""
    found = {broken.check for broken in BROKEN.values()}
    found |= {check for _, check, _ in OTHERS_BROKEN.values()}
    assert found == set(CHECKS)


def test_report_names_all_failures():
    def kernel(a, b):
        return writing_b(a, b) * 2

    spec = product_spec(kernel, backward=None, devices=("cpu",))
    with pytest.raises(OperatorCheckError) as caught:
        check_operator(spec, checks=["values", "writes_only_what_is_declared"])
    name = spec.name.removeprefix("broken::")
    lines = str(caught.value).splitlines()
    assert lines[0] == f"{spec.name} fails 9 of 18 cases"
    assert lines[2].startswith(f"{name}-cpu-float32-values-size7: output 0 is wrong in 21 of 21")
    assert lines[3] == (
        f"2 more cases of values: {name}-cpu-bfloat16-values-size7, {name}-cpu-float64-values-size7"
    )
    assert f"5 more cases of writes_only_what_is_declared: {name}-cpu-float32-writes" in lines[6]
    assert len(caught.value.failures) == 9


def test_ids_name_operator_device_dtype_check_and_sample():
    spec = product_spec()
    ids = [case.id for case in cases(spec)]
    assert len(set(ids)) == len(ids)
    name = spec.name.removeprefix("broken::")
    for words in (
        "cpu-float32-values-size0",
        "foo-bfloat16-layouts-size7-every_second",
        "foo-float64-opcheck-size7-gradient",
        "foo-float64-gradcheck-size7",
        "cpu-float32-compiled_for_dynamic_shapes",
        "foo:1-float32-second_device",
    ):
        assert f"{name}-{words}" in ids


def test_variants_have_ids_of_their_own():
    ids = [case.id for case in cases(torch_out_spec(), ["values"])]
    assert ids[0] == "mul.out-cpu-float32-values-size0"


def torch_out_spec():
    return spec_of(torch.ops.aten.mul.Tensor).variant(torch.ops.aten.mul.out)


def test_operator_may_be_a_packet_or_a_definition():
    @torch.library.custom_op("broken::defined", mutates_args=())
    def defined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return product(a, b)

    for operator in (defined, torch.ops.broken.defined):
        assert spec_of(operator).operator is torch.ops.broken.defined.default
    with pytest.raises(TypeError, match=r"operator must be an operator .* got function"):
        spec_of(product)


def test_spec_names_what_is_missing():
    for field in ("dtypes", "devices"):
        with pytest.raises(ValueError, match=rf"OpSpec\(aten::abs\): {field} must not be empty"):
            spec_of(torch.ops.aten.abs, **{field: ()})
    with pytest.raises(ValueError, match="samples must not be empty"):
        spec_of(torch.ops.aten.abs, sizes=())
    with pytest.raises(ValueError, match="essential must not be empty"):
        spec_of(torch.ops.aten.abs, sizes=(20,))
    for field in ("essential", "in_layouts"):
        message = f"{field} must name samples, got 'large'; the samples are size0, size7"
        with pytest.raises(ValueError, match=message):
            spec_of(torch.ops.aten.abs, **{field: ("large",)})


def test_unknown_check_is_refused():
    with pytest.raises(ValueError, match=r"checks must be among values, .*, got 'speed'"):
        cases(spec_of(torch.ops.aten.abs), ["speed"])


def test_tolerances_follow_from_the_dtype_and_can_be_given():
    def rough(a, b):
        return product(a, b) * (1 + 1e-4)

    spec = product_spec(rough, dtypes=(torch.float32, torch.bfloat16), devices=("cpu",))
    assert all("float32" in name for name in failures_of(spec, ["values"]))
    given = {torch.float32: (1e-3, 0.0)}
    check_operator(dataclasses.replace(spec, tolerances=given), checks=["values"])


def test_random_samples_are_the_same_in_every_call():
    def sized(dtype, size):
        return Sample((torch.randn(size).to(dtype), torch.randn(size).to(dtype)))

    state = torch.get_rng_state()
    check_operator(product_spec(sized=sized), checks=["values", "gradients", "layouts"])
    assert torch.equal(torch.get_rng_state(), state)
