"""check_operator judges operators of all signatures: wrong ones fail, right ones pass."""

import dataclasses

import pytest
import torch
from support.broken_products import BROKEN
from support.product_operator import (
    NAMES,
    define,
    empty_product,
    failures_of,
    pair,
    product,
    product_spec,
    require_message,
    spec_of,
)

from foo_ops.testing import (
    CHECKS,
    Sample,
    check_operator,
    random,
)


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
    """Values are differentiable, indices are not."""
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
    """Make the spec of an operator that returns 2 x and 3 x."""
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
    """Make a spec without a gradient formula and without tolerances."""
    operator = define(product, fake=empty_product)
    samples = {"wrap": lambda dtype: Sample((torch.tensor([100, 7]).to(dtype),) * 2)}

    def sized(dtype, size):
        return Sample((torch.arange(size).to(dtype), torch.arange(size).to(dtype)))

    return spec_of(operator, dtypes=(torch.int64, torch.uint8), sized=sized, samples=samples)


def written(a, b):
    a.mul_(b)


def written_spec(kernel=written):
    """Make the spec of an operator that only writes an argument and returns nothing."""
    operator = define(kernel, "(Tensor(a!) a, Tensor b) -> ()", fake=lambda a, b: None)
    return spec_of(operator, differentiable=False)


def in_place_spec(kernel=lambda a, b: a.mul_(b)):
    """Make the spec of a *= b."""
    schema = "(Tensor(a!) a, Tensor b) -> Tensor(a!)"
    operator = define(kernel, schema, fake=lambda a, b: a, tags=(torch.Tag.inplace,))
    return product_spec().variant(operator, differentiable=False)


def out_spec(kernel=lambda a, b, *, out: out.copy_(a * b)):
    """Make the spec of torch.mul(a, b, out=out)."""
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
    # tests/operators/test_matrix.py covers Inductor on the cpu.
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


def frozen(a, b):
    generator = torch.Generator().manual_seed(0)
    return a + torch.rand(a.shape, dtype=a.dtype, generator=generator) * b


def frozen_spec():
    operator = define(frozen, fake=empty_product, tags=(torch.Tag.nondeterministic_seeded,))
    options = {"draws": 500, "differentiable": False, "devices": ("cpu",)}
    return spec_of(operator, reference=lambda a, b: a + 0.5 * b, **options)


OTHERS_BROKEN = {
    "the same numbers for every seed": (
        frozen_spec,
        "draws_follow_the_seed",
        "four seeds give the same results: no numbers",
    ),
    "second tensor of a list written": (
        lambda: lists_spec(lambda tensors, *, factor, offset=0: [t.mul_(factor) for t in tensors]),
        "writes_only_what_is_declared",
        r"the operator writes its argument tensors\[0\], but its schema does not declare",
    ),
    "outputs in common memory": (
        lambda: lists_spec(scaled_in_common_memory),
        "aliases_only_what_is_declared",
        "output 0 shares memory with output 0",
    ),
    "fake kernel forgets a tensor": (
        lambda: lists_spec(fake=lambda tensors, **options: scale_fake(tensors, **options)[1:]),
        "fake_kernel",
        "the fake kernel must return 2 tensors, got 1",
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
        r"the fake kernel gives output 0 the shape \(2,\), but the kernel",
    ),
    "one element more": (
        lambda: data_dependent_spec(lambda x: torch.cat([positives(x), x.new_ones(1)])),
        "values",
        "output 0 must have shape .* as the reference has, got",
    ),
    "argument not written": (lambda: written_spec(not_written), "values", "output 0 is wrong"),
    "other argument written": (
        lambda: written_spec(second_written_too),
        "writes_only_what_is_declared",
        "the operator writes its argument b, but its schema does not declare this",
    ),
    "copy returned in place": (
        lambda: in_place_spec(returned_copy),
        "aliases_only_what_is_declared",
        "output 0 must be the argument a itself, got another tensor",
    ),
    "out given other memory": (
        lambda: out_spec(out_moved),
        "out_in_layouts",
        "an out argument of the right shape and dtype must keep its memory, got other memory",
    ),
    "strides of out ignored": (
        lambda: out_spec(out_strides_ignored),
        "out_in_layouts",
        "output 0 is wrong in",
    ),
    "written beside out": (
        lambda: out_spec(out_strides_ignored),
        "writes_only_what_is_declared",
        "the operator writes to the memory of its argument out outside of the tensor's elements",
    ),
    "threads": (
        lambda: product_spec(depending_on_threads, large=lambda dtype: pair(dtype, 5)),
        "same_bits_for_any_number_of_threads",
        "2 threads give other results than 1",
    ),
    "number of outputs": (
        lambda: spec_of(product_spec().operator, reference=lambda a, b: (a * b, a)),
        "values",
        "the operator has 1 outputs, but its reference 2",
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
    hint = ". If the operator returns the argument that it writes, define it with torch.Tag.inplace"
    for message in failures_of(spec, ["opcheck"]).values():
        assert message.splitlines()[-2].endswith(hint)


def test_every_check_finds_something():
    """Each check fails for some operator."""
    found = {broken.check for broken in BROKEN.values()}
    found |= {check for _, check, _ in OTHERS_BROKEN.values()}
    assert found == set(CHECKS)
