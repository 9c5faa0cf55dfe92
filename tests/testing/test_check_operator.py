"""check_operator finds and names each fault of operators that are broken once."""

import dataclasses

import pytest
import torch
from support.broken_products import (
    BROKEN,
    writing_b,
    writing_beside_the_result,
    wrong_backward,
)
from support.product_operator import (
    failures_of,
    product,
    product_spec,
    require_message,
    spec_of,
)

from foo_ops.testing import (
    OperatorCheckError,
    Sample,
    cases,
    check_operator,
)


@pytest.mark.parametrize("name", BROKEN)
def test_broken_operator_is_found(name):
    broken = BROKEN[name]
    spec = product_spec(
        broken.make, fake=broken.fake, backward=broken.backward, differentiable=True
    )
    if broken.register is not None:
        broken.register(spec.operator)
    if broken.check.startswith(("compiled", "opcheck")):
        spec = dataclasses.replace(spec, devices=("foo",), dtypes=(torch.float32,))
    require_message(spec, broken.check, broken.message)


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
        "The sample 'size7', float32 on cpu, was passed to the operator, and fresh memory was full "
        "of NaN."
    )
    assert lines[4] == (
        f"2 more cases of values: {name}-cpu-bfloat16-values-size7, {name}-cpu-float64-values-size7"
    )
    assert f"5 more cases of writes_only_what_is_declared: {name}-cpu-float32-writes" in lines[8]
    assert len(caught.value.failures) == 9


def test_an_operator_is_not_blamed_for_what_another_wrote():
    check = "writes_only_what_is_declared"
    kept = []

    def kernel(a, b):
        kept.append(writing_beside_the_result(a, b))
        return kept[-1]

    failures_of(product_spec(kernel, backward=None, devices=("cpu",)), [check])
    right = product_spec(backward=None, devices=("cpu",))
    check_operator(right, checks=[check])

    def kernel_that_frees(a, b):
        kept.clear()
        return product(a, b)

    freeing = product_spec(kernel_that_frees, backward=None, devices=("cpu",))
    check_operator(freeing, checks=[check])


@pytest.mark.parametrize(
    ("check", "treatment"),
    [
        (
            "layouts",
            "The sample 'size7', float32 on foo, was laid out by every_second (Give the last "
            "dimension a stride of 2), passed to the operator, and fresh memory was full of NaN.",
        ),
        ("opcheck", "was passed to torch.library.opcheck, requiring gradients."),
        (
            "compiled_for_dynamic_shapes",
            "The sample, float32 on foo, was of size 9, and then of sizes 6 and 19 for the same "
            "graph of torch.compile(dynamic=True), with a copy before the operator.",
        ),
        (
            "compiled_graph",
            "The sample, float32 on foo, was replaced by all essential samples in one graph, "
            "compiled by torch.compile, with two negations before the operator.",
        ),
    ],
)
def test_failure_says_what_was_done_to_the_sample(check, treatment):
    spec = product_spec(
        writing_b, backward=wrong_backward, dtypes=(torch.float32,), devices=("foo",)
    )
    messages = failures_of(spec, [check]).values()
    assert any(message.endswith(treatment) for message in messages), messages


def test_ids_name_operator_device_dtype_check_and_sample():
    spec = product_spec()
    ids = [case.id for case in cases(spec)]
    assert len(set(ids)) == len(ids)
    name = spec.name.removeprefix("broken::")
    for words in (
        "cpu-float32-values-size0",
        "foo-bfloat16-layouts-size7-every_second",
        "foo-float64-opcheck-size7-gradient",
        "cpu-float64-gradcheck-size7",
        "cpu-float32-compiled_graph",
        "cpu-bfloat16-compiled_for_dynamic_shapes",
        "cpu-float32-compiled_for_inference-size7",
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
