"""Random operators of foo draw from foo's generator and change no other."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.random_numbers import drawn_on_both

ROUNDS = 200

# Operators with the tag whose CPU kernels draw nothing.
DRAW_NOTHING = {
    "aten::_fused_sdp_choice",
    "aten::_nested_tensor_softmax_with_shape",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}

HOST_KEYS = ("CPU", "SparseCPU", "SparseCsrCPU", "QuantizedCPU", "NestedTensorCPU")


@pytest.fixture(autouse=True)
def unchanged_state():
    states, cpu = torch.foo.get_rng_state_all(), torch.get_rng_state()
    yield
    torch.foo.set_rng_state_all(states)
    torch.set_rng_state(cpu)


def random_operators_without_generator() -> list[str]:
    names = []
    for name in torch._C._dispatch_get_all_op_names():
        qualified, _, overload = name.partition(".")
        namespace, base = qualified.split("::")
        try:
            op = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        except (AttributeError, RuntimeError):  # no schema
            continue
        takes_generator = any("Generator" in str(each.type) for each in op._schema.arguments)
        if torch.Tag.nondeterministic_seeded in op.tags and not takes_generator:
            names.append(name)
    return names


def test_each_random_operator_without_a_generator_has_a_kernel_of_foo():
    """Composites draw in their parts, and operators of other devices cannot run here."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = random_operators_without_generator()
    assert {"aten::native_dropout", "aten::rand", "aten::dropout"} <= set(names)
    unknown = [
        (name, key)
        for name in names
        for key in HOST_KEYS
        if has_kernel(name, key)
        and name not in DRAW_NOTHING
        and not has_kernel(name, key.replace("CPU", "PrivateUse1"))
    ]
    assert unknown == []
    counts = torch.foo.operator_counts
    torch.foo.reset_operator_counts()
    torch.native_dropout(torch.ones(3, device="foo"), 0.5, True)
    assert counts()["aten::native_dropout"].own == 1


def draws(draw: Callable[[], torch.Tensor], numbers: list[bytes]) -> None:
    for _ in range(ROUNDS):
        numbers.append(draw().cpu().numpy().tobytes())


def draw_on_cpu() -> torch.Tensor:
    return torch.rand(1000)


def draw_on_foo() -> torch.Tensor:
    return F.dropout(torch.ones(10000, device="foo"), 0.5)


def test_threads_draw_the_numbers_of_one_thread():
    torch.manual_seed(3)
    alone: dict[Callable[[], torch.Tensor], list[bytes]] = {}
    for draw in (draw_on_cpu, draw_on_foo):
        alone[draw] = []
        for _ in range(4):
            draws(draw, alone[draw])
    states = torch.get_rng_state(), torch.foo.get_rng_state()

    torch.manual_seed(3)
    together: dict[Callable[[], torch.Tensor], list[bytes]] = {
        draw_on_cpu: [],
        draw_on_foo: [],
    }
    threads = [
        threading.Thread(target=draws, args=(draw, together[draw]))
        for _ in range(4)
        for draw in (draw_on_cpu, draw_on_foo)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for draw in alone:
        assert sorted(together[draw]) == sorted(alone[draw])
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.foo.get_rng_state(), states[1])


def nested(device: str) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], device=device)


def rnn(device: str) -> torch.Tensor:
    with torch.random.fork_rng(devices=[0], device_type="foo"):
        torch.manual_seed(1)
        module = torch.nn.LSTM(3, 4, num_layers=3, dropout=0.5).to(device)
    return module(torch.ones(2, 5, 3, device=device))[0].detach()


DROPOUTS = {
    "dropout": lambda device: F.dropout(torch.ones(40, device=device), 0.3),
    "dropout_": lambda device: F.dropout(torch.ones(40, device=device), 0.3, inplace=True),
    "alpha_dropout": lambda device: F.alpha_dropout(torch.ones(40, device=device), 0.3, True),
    "feature_dropout": lambda device: F.dropout2d(torch.ones(9, 4, 2, 2, device=device), 0.3),
    "feature_alpha_dropout": lambda device: F.feature_alpha_dropout(
        torch.ones(9, 4, 2, 2, device=device), 0.3, True
    ),
    "native_dropout": lambda device: torch.native_dropout(torch.ones(40, device=device), 0.3, True)[
        0
    ],
    "native_dropout.out": lambda device: torch.ops.aten.native_dropout.out(
        torch.ones(40, device=device),
        0.3,
        True,
        out0=torch.empty(0, device=device),
        out1=torch.empty(0, dtype=torch.bool, device=device),
    )[0],
    "nested": lambda device: torch.cat([each.flatten() for each in F.dropout(nested(device), 0.3)]),
    "rnn": rnn,
    "strided": lambda device: F.dropout(torch.ones(6, 8, device=device).t()[::2], 0.3),
    "bfloat16": lambda device: F.dropout(
        torch.ones(40, dtype=torch.bfloat16, device=device), 0.3
    ).float(),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_has_the_cpu_s_numbers_and_leaves_its_generator(name):
    expected, actual = drawn_on_both(DROPOUTS[name])
    for one, other in zip(actual, expected):
        torch.testing.assert_close(one.cpu(), other)
        assert one.stride() == other.stride()


def test_dropout_draws_from_the_generator_of_its_device():
    torch.manual_seed(5)
    state = torch.foo.get_rng_state(0)
    F.dropout(torch.ones(40, device="foo:1"), 0.3)
    assert torch.equal(torch.foo.get_rng_state(0), state)
    assert not torch.equal(torch.foo.get_rng_state(1), state)


def test_dropout_outside_of_training_and_of_nothing_draws_nothing():
    states = torch.get_rng_state(), torch.foo.get_rng_state()
    x = torch.ones(4, device="foo", requires_grad=True)
    output, mask = torch.native_dropout(x, 0.5, False)
    assert output.tolist() == [1] * 4
    assert mask.all()
    assert torch.native_dropout(x[:0], 0.5, True)[0].shape == (0,)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(torch.foo.get_rng_state(), states[1])
    dropped = F.dropout(x, 0.5)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(grad, dropped.detach())


def test_an_operator_that_draws_only_from_the_cpu_s_generator_is_refused():
    with torch.library._scoped_library("foo_random_test", "FRAGMENT") as library:
        library.define("noise(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("noise", lambda x: x + torch.rand(x.shape), "CPU")
        noise = torch.ops.foo_random_test.noise
        assert noise(torch.zeros(3)).shape == (3,)
        message = (
            "foo_random_test::noise draws random numbers and takes no generator, so its "
            "kernel for cpu cannot run on foo: register a kernel for foo"
        )
        with pytest.raises(NotImplementedError, match=message):
            noise(torch.zeros(3, device="foo"))
