"""FlopCounterMode counts all of foo's operators and a user's elementwise operators."""

import random

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import foo_ops
from foo_ops import library

# Operators that only draw random numbers from integers, or copy.
NOT_COUNTED = {
    "foo::attention_dropout_mask",
    "foo::attention_dropout_numbers",
    "foo::cache_append",
}


def flops(function, *arguments, **keywords):
    with FlopCounterMode(display=False) as counter:
        result = function(*arguments, **keywords)
    return counter.get_total_flops(), result


def count(function, *arguments, **keywords):
    """Count the operations of a call and of its backward pass."""
    forward, result = flops(function, *arguments, **keywords)
    results = (result,) if isinstance(result, torch.Tensor) else result
    loss = sum(result.sum() for result in results)
    return forward, flops(loss.backward)[0]


def test_every_operator_counts():
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if is_ours(schema)}
    packets = {name: getattr(torch.ops.foo, name.removeprefix("foo::")) for name in names}
    missing = {name for name, packet in packets.items() if packet not in flop_registry}
    assert missing == NOT_COUNTED


def is_ours(schema):
    """Exclude operators of torch's own tests, which share the namespace."""
    return schema.name.startswith("foo::") and "custom_autograd_fn" not in schema.name


def test_rows(device):
    input = torch.randn(3, 5, device=device, requires_grad=True)
    weight = torch.ones(5, device=device)
    assert count(foo_ops.rms_norm, input) == (3 * 15, 7 * 15)
    assert count(foo_ops.rms_norm, input, weight) == (4 * 15, 12 * 15)
    assert count(foo_ops.add_rms_norm, input, input.detach()) == (4 * 15, 8 * 15)
    assert count(foo_ops.add_rms_norm, input, input.detach(), weight) == (5 * 15, 13 * 15)
    assert count(foo_ops.layer_norm, input) == (6 * 15, 13 * 15)
    assert count(foo_ops.layer_norm, input, weight, weight) == (8 * 15, 17 * 15)
    assert count(foo_ops.add_layer_norm, input, input.detach()) == (7 * 15, 14 * 15)


def test_dequantized_weights(device):
    weight = torch.randn(6, 64, device=device)
    for quantized, expected in (
        (foo_ops.quantize_weight(weight, 8), 6 * 64),
        (foo_ops.quantize_weight(weight, 4, 32), 2 * 6 * 64),
    ):
        assert flops(foo_ops.dequantize_weight, *quantized)[0] == expected
    assert flops(foo_ops.dequantize_mxfp4, *foo_ops.quantize_mxfp4(weight))[0] == 6 * 64


@pytest.mark.parametrize("inplace", [False, True])
def test_rotations_count_what_turns(inplace, device):
    input = torch.randn(2, 3, 10, device=device)
    tables = [torch.randn(3, 4, device=device)] * 2
    found, _ = flops(foo_ops.rotary_embedding, input, *tables, inplace=inplace)
    assert found == 6 * (2 * 3 * 4)
    backward = count(foo_ops.rotary_embedding, input.clone().requires_grad_(), *tables)
    assert backward == (found, found)


@pytest.mark.parametrize(("smoothing", "forward"), [(0.0, 4), (0.1, 6)])
def test_losses(smoothing, forward, device):
    logits = torch.randn(3, 7, device=device, requires_grad=True)
    target = torch.tensor([1, 6, 0], device=device)
    found = count(foo_ops.softmax_cross_entropy, logits, target, label_smoothing=smoothing)
    assert found == (forward * 21, 4 * 21)


def test_the_loss_of_a_layer_counts_products(device):
    hidden, weight = torch.randn(3, 5, device=device), torch.randn(7, 5, device=device)
    target = torch.tensor([1, 6, 0], device=device)
    product = 2 * (3 * 5 * 7)
    for needed in ((True, True), (True, False), (False, True)):
        tensors = [it.requires_grad_(is_) for it, is_ in zip((hidden, weight), needed)]
        # Exponentials of the logits are kept, except with a soft cap.
        found = count(foo_ops.linear_cross_entropy, *tensors, target)
        assert found == (product, sum(needed) * product)
        found = count(foo_ops.linear_cross_entropy, *tensors, target, softcap=1.0)
        assert found == (product, (1 + sum(needed)) * product)


def test_flex_attention_counts_products_and_no_mask(device):
    """Two matrix products forward and five for the gradients, whatever a mask hides."""
    query, key = (torch.randn(2, 4, size, 8, device=device) for size in (5, 7))
    query.requires_grad_()
    value = torch.randn(2, 4, 7, 6, device=device)
    scores, values = 2 * (2 * 4 * 5 * 7) * 8, 2 * (2 * 4 * 5 * 7) * 6
    found = count(foo_ops.flex_attention, query, key, value, block_mask=lambda b, h, q, k: q >= k)
    assert found == (scores + values, 3 * scores + 2 * values)


def test_packed_flex_attention_counts_its_sequences(device):
    query, key = (torch.randn(size, 4, 8, device=device) for size in (5, 7))
    query.requires_grad_()
    starts = [torch.tensor(it, dtype=torch.int32, device=device) for it in ([0, 2, 5], [0, 3, 7])]
    product = 2 * 4 * 8 * (2 * 3 + 3 * 4)
    found = count(
        foo_ops.flex_attention_varlen, query, key, key, *starts, max_seqlen_q=3, max_seqlen_k=4
    )
    assert found == (2 * product, 5 * product)


def test_elementwise_operators_count_their_functions(device):
    gate = torch.randn(3, 1, device=device, requires_grad=True)
    up = torch.randn(4, device=device, requires_grad=True)
    # gate / (1 + exp(-gate)) * up
    assert flops(foo_ops.silu_mul, gate, up)[0] == 5 * 12
    assert flops(foo_ops.abs, gate)[0] == 3
    assert flops(torch.ops.foo.abs_, gate.detach())[0] == 3
    assert flops(foo_ops.abs, gate.detach(), out=torch.empty_like(gate))[0] == 3


def test_an_author_takes_the_place_of_what_is_counted_by_itself(device):
    @library.numba_op("test_flops::fused", backward=lambda grad, x, y: (grad * y, grad * x))
    def fused(x: float, y: float) -> float:
        return x * y + 1.0

    x = torch.ones(6, device=device, requires_grad=True)
    assert count(fused, x, torch.ones(6, device=device)) == (2 * 6, 2 * 6)
    library.register_flops("test_flops::fused")(lambda *shapes, **_: 41)
    library.register_flops("test_flops::fused")(lambda *shapes, **_: 42)
    assert flops(fused, x, x)[0] == 42


def test_a_later_kernel_leaves_what_an_author_counts():
    library.define("test_flops::twice", "(Tensor input) -> Tensor")
    library.register_flops("test_flops::twice")(lambda *shapes, **_: 42)
    kernel = library.elementwise_kernel(lambda x: 2 * x)
    library.register_kernel("test_flops::twice", ("cpu", "foo"), kernel)
    assert flops(torch.ops.test_flops.twice, torch.ones(6))[0] == 42


class Hashed:
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number


def test_packet_whose_hash_changes(monkeypatch):
    library.define("test_flops::thrice", "(Tensor input) -> Tensor")
    packet, numbers = torch.ops.test_flops.thrice, random.Random(0)
    registry = dict(flop_registry)
    monkeypatch.setattr(torch.utils.flop_counter, "flop_registry", registry)
    for _ in range(20000):
        monkeypatch.setattr(packet, "_op", Hashed(numbers.getrandbits(60)))
        library.register_flops("test_flops::thrice")(lambda *shapes, **_: 42)
    assert registry[packet]([1], out_val=None) == 42


def test_results_without_elements(device):
    empty = torch.empty(0, 1, device=device)
    assert flops(foo_ops.silu_mul, empty, torch.empty(4, device=device))[0] == 0


def test_operators_that_only_write():
    library.define("test_flops::double_", "(Tensor(a!) input) -> ()")
    library.register_kernel(
        "test_flops::double_", "cpu", library.elementwise_kernel(lambda x: 2 * x)
    )
    assert flops(torch.ops.test_flops.double_, torch.ones(5))[0] == 5
