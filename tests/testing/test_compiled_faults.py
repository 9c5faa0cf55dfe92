"""Failures of compiled graphs name the faulty part: the operator, or PyTorch, and the size."""

import dataclasses
import itertools
import re

import pytest
import torch
from support.product_operator import (
    define,
    empty_product,
    failures_of,
    product,
    product_spec,
    spec_of,
)

from foo_ops import library
from foo_ops.testing import KnownFaultWarning, Sample, cases, check_operator
from foo_ops.testing.checks import compilation

CPU_ALONE = {"devices": ("cpu",), "differentiable": False}


def times_ten(x):
    x.mul_(10)


def writing_spec(kernel=times_ten):
    """Make the spec of an operator that multiplies its argument, stored after other elements."""
    operator = define(kernel, "(Tensor(a!) x) -> ()", fake=lambda x: None)

    def sized(dtype, size):
        return Sample((torch.arange(size + 3).to(dtype)[3:],))

    options = CPU_ALONE | {"dtypes": (torch.int64,), "essential": ("size7",)}
    return spec_of(operator, reference=lambda x: x * 10, sized=sized, **options)


@pytest.mark.whole
def test_a_known_fault_of_pytorch_is_named_and_not_counted():
    """When PyTorch fixes the fault, the version range in KNOWN_FAULTS ends."""
    assert compilation.reads_a_clone_elsewhere()
    with pytest.warns(KnownFaultWarning, match="Inductor takes the clone of a view") as caught:
        check_operator(writing_spec(), checks=["compiled_graph", "compiled_for_dynamic_shapes"])
    names = [str(warning.message).partition(":")[0] for warning in caught]
    assert [name.rpartition("-")[2] for name in names] == [
        "compiled_graph",
        "compiled_for_dynamic_shapes",
    ]


def test_no_fault_of_the_operator_hides_behind_a_known_one():
    calls = itertools.count(10)

    def kernel(x):
        x.mul_(next(calls))

    (message,) = failures_of(writing_spec(kernel), ["compiled_graph"]).values()
    assert "aot_eager, which runs the graph as it is, fails, too: the operator's schema" in message


def test_a_fault_is_looked_for_in_some_versions(monkeypatch):
    ended = dataclasses.replace(compilation.KNOWN_FAULTS[0], last="2.12")
    monkeypatch.setattr(compilation, "KNOWN_FAULTS", (ended,))
    (message,) = failures_of(writing_spec(), ["compiled_graph"]).values()
    assert f"Inductor is wrong (PyTorch {torch.__version__}), not the operator" in message


def test_what_inductor_alone_reads_of_the_fake_kernel():
    """Also the fake kernel's strides; aot_eager takes those from the results."""

    def fake(a, b):
        return a.new_empty(a.shape[::-1]).t()

    spec = product_spec(fake=fake, backward=None, dtypes=(torch.float32,), devices=("cpu",))
    case, attempts = cases(spec, ["compiled_graph"])[0], []

    def attempt(backend, samples):
        attempts.append(backend)
        if backend == "inductor":
            raise AssertionError("the strides differ")

    message = "the strides differ. The backend aot_eager is right, but Inductor relies on more of "
    with pytest.raises(AssertionError, match=re.escape(message)):
        compilation.check_graph(case, [case.sized(5)], attempt)
    assert attempts == ["inductor", "aot_eager"]


def sizes_spec(sized, kernel=product, fake=empty_product):
    operator = define(kernel, fake=fake)
    options = CPU_ALONE | {"devices": ("foo",), "dtypes": (torch.float32,)}
    return spec_of(operator, sized=sized, **options)


def test_a_size_of_1_in_the_samples():
    def sized(dtype, size):
        return Sample((torch.ones(size, size // 6).to(dtype), torch.ones(size // 6).to(dtype)))

    (message,) = failures_of(sizes_spec(sized), ["compiled_for_dynamic_shapes"]).values()
    wanted = (
        "does not serve size 19: a.shape[1] was 1 and is 3, b.shape[0] was 1 and is 3, and "
        "PyTorch compiles another graph for each size 0 or 1"
    )
    assert wanted in message


def test_a_size_that_the_fake_kernel_decides():
    def fake(a, b):
        return a.new_empty(a.shape[0], int(b.shape[1]))

    def sized(dtype, size):
        return Sample((torch.ones(4, size).to(dtype), torch.ones(4, size).to(dtype)))

    (message,) = failures_of(sizes_spec(sized, fake=fake), ["compiled_for_dynamic_shapes"]).values()
    assert "was specialised to a size, b.shape[1], which was 9 and is 6. Comparing" in message


def test_failures_name_what_allows_more():
    options = {"dtypes": (torch.float32,), "devices": ("cpu",)}
    rough = product_spec(lambda a, b: product(a, b) * 1.01, backward=None, **options)
    steep = product_spec(backward=wrong_by_a_hundredth, **options)
    for spec, check, knob in (
        (rough, "values", "output_budget="),
        (steep, "gradients", "gradient_budget="),
    ):
        (message,) = failures_of(spec, [check]).values()
        assert f" is allowed (by tolerances= or {knob} of the OpSpec)" in message


def wrong_by_a_hundredth(ctx, grad):
    a, b = ctx.saved_tensors
    return grad * b * 1.01, grad * a


def test_vmap_does_not_tell_about_speed(capfd):
    spec = product_spec(**CPU_ALONE, backward=None)
    check_operator(spec, checks=["mapped"])
    assert capfd.readouterr().err == ""
    # PyTorch still warns in other calls.
    torch.vmap(spec.operator)(torch.ones(2, 3), torch.ones(2, 3))
    assert "There is a performance drop" in capfd.readouterr().err


def test_a_loop_of_vmap_is_told_of_where_it_is_wrong():
    def of_one_sample(a, b):
        return product(a, b) * (1 if a.storage_offset() == 0 else 2)

    spec = product_spec(of_one_sample, **CPU_ALONE, backward=None)
    for message in failures_of(spec, ["mapped"]).values():
        assert "element 1 of the mapped dimension (by PyTorch's loop, since" in message


# -------------------------------------------------------------------------------- random numbers


def random_spec(kernel, backward=None, **changes):
    """Make the spec of a + u * b, where u is drawn per element from 0 to 1."""
    operator = define(kernel, fake=empty_product, tags=(torch.Tag.nondeterministic_seeded,))
    if backward is not None:
        library.register_autograd(operator, backward, setup_context=keep_factor)
    options = {"dtypes": (torch.float64, torch.float32), "devices": ("cpu",), "draws": 500}
    options |= {"differentiable": backward is not None} | changes
    return spec_of(operator, reference=lambda a, b: a + 0.5 * b, **options)


def noise(a, b):
    return (a + torch.rand(a.shape, dtype=a.dtype) * b).contiguous()


def keep_factor(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def noise_backward(ctx, grad):
    a, b, output = ctx.saved_tensors
    return grad, grad * (output - a) / b


@pytest.mark.whole
def test_an_operator_that_draws_random_numbers():
    check_operator(random_spec(noise, noise_backward))


STATE = []


def unseeded(a, b):
    STATE.append(None)
    return a + 0.5 * b + len(STATE)


def frozen(a, b):
    generator = torch.Generator().manual_seed(0)
    return a + torch.rand(a.shape, dtype=a.dtype, generator=generator) * b


def again(a, b):
    state = torch.get_rng_state()
    result = noise(a, b)
    torch.set_rng_state(state)
    return result


def wrong_gradient(ctx, grad):
    a, b, output = ctx.saved_tensors
    return grad, grad * (output - a) / b * 2


@pytest.mark.parametrize(
    ("kernel", "backward", "check", "message"),
    [
        (lambda a, b: noise(a, b) + 0.3, None, "values", "the mean of output 0 over 500 seeds is"),
        (unseeded, None, "draws_follow_the_seed", "two calls with the same seed differ"),
        (frozen, None, "draws_follow_the_seed", "four seeds give the same results: no numbers"),
        (again, None, "draws_follow_the_seed", "a second call draws the same numbers as the first"),
        (noise, wrong_gradient, "gradients", "the mean of the gradient of b over 500 seeds is"),
        (noise, wrong_gradient, "gradcheck", "Jacobian mismatch"),
    ],
    ids=["mean", "unseeded", "frozen", "again", "gradient", "gradient, numerically"],
)
def test_random_operator_that_is_wrong(kernel, backward, check, message):
    spec = random_spec(kernel, backward)
    assert any(message in text for text in failures_of(spec, [check]).values())


def test_a_random_operator_without_draws():
    (message, *_) = failures_of(random_spec(noise, draws=0), ["values"]).values()
    hint = "Another call gives another result: if the operator draws random numbers, set draws="
    assert hint in message


def test_wrong_draws():
    with pytest.raises(ValueError, match=r"draws must be 0 or at least 2, got 1$"):
        random_spec(noise, draws=1)
    with pytest.raises(
        ValueError, match=r"a statistic must be given together with draws, got none$"
    ):
        random_spec(noise, draws=0, statistic=lambda outputs, a, b: outputs)
