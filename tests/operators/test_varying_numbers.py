"""Numbers that change from call to call do not compile a program for each value."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import foo_ops
from foo_ops import library

# The first value is a constant of the first graph; the second one makes it a symbol.
MOST_GRAPHS = 3
STARTS = torch.tensor([0, 3, 9], dtype=torch.int32)
PACKED = {"max_seqlen_q": 9, "max_seqlen_k": 9}
DECAY = [2.0 * 0.9**step for step in range(4)]
SHARES = [0.3 * 0.9**step for step in range(4)]
WINDOWS = list(range(1, 5))


@library.numba_op("varying::capped", backward=lambda g, x, cap: g if x < cap else 0.0)
def capped(x: float, *, cap: float = 6.0) -> float:
    return min(x, cap)


@library.numba_op("varying::blend", backward=lambda g, x, y, by: (g * by, g * (1 - by)))
def blend(x: float, y: float, *, by: int | float = 0.5) -> float:
    return x * by + y * (1 - by)


def packed(tensor):
    return tensor.squeeze(0).transpose(0, 1)


def varlen(q, k, v, **options):
    tokens = map(packed, (q, k, v))
    return foo_ops.attention_varlen(*tokens, STARTS, STARTS, **PACKED, **options)


def int8_cache(q, k, v, **options):
    q, k, v = (it.detach() for it in (q, k, v))
    (keys, key_scale), (values, value_scale) = map(foo_ops.quantize_cache, (k, v))
    return foo_ops.attention_int8_cache(q, keys, values, key_scale, value_scale, **options)[0]


def target_of(k):
    return (k.detach().abs().sum(-1) % 8).long()


def autocast(q, k, v, x):
    with torch.autocast("cpu", torch.bfloat16):
        return foo_ops.attention(q, k, v, softcap=x).float()


def on_foo(q, k, v, x):
    q, k, v = (it.to("foo") for it in (q, k, v))
    return foo_ops.attention(q, k, v, softcap=x, window_left=3).cpu()


CASES = {
    "softcap": (lambda q, k, v, x: foo_ops.attention(q, k, v, softcap=x), DECAY),
    "integers as softcap": (lambda q, k, v, x: foo_ops.attention(q, k, v, softcap=x), WINDOWS),
    "softcap of the packet": (lambda *t: torch.ops.foo.attention(*t[:3], softcap=t[3])[0], DECAY),
    "scale": (lambda q, k, v, x: foo_ops.attention(q, k, v, scale=x / 2 + 1), DECAY),
    "negative scale": (
        lambda q, k, v, x: torch.ops.foo.attention.default(q, k, v, scale=-x)[0],
        DECAY,
    ),
    "dropout_p": (lambda q, k, v, x: foo_ops.attention(q, k, v, dropout_p=x), SHARES),
    "constant dropout_p": (
        lambda q, k, v, x: foo_ops.attention(q, k, v, dropout_p=0.5, softcap=x),
        DECAY,
    ),
    "windows": (
        lambda q, k, v, x: foo_ops.attention(q, k, v, window_left=x, window_right=2 * x),
        WINDOWS,
    ),
    "autocast": (autocast, DECAY),
    "foo": (on_foo, DECAY),
    "checkpoint": (
        lambda q, k, v, x: torch.utils.checkpoint.checkpoint(
            lambda it: foo_ops.attention(it, k, v, softcap=x), q, use_reentrant=False
        ),
        DECAY,
    ),
    "packed": (lambda q, k, v, x: varlen(q, k, v, softcap=x, dropout_p=0.2), DECAY),
    "packed windows": (lambda q, k, v, x: varlen(q, k, v, window_left=x), WINDOWS),
    "int8_cache": (
        lambda q, k, v, x: int8_cache(q, k, v, softcap=x, window_left=4, scale=x / 3),
        DECAY,
    ),
    "int8_cache windows": (
        lambda q, k, v, x: int8_cache(q, k, v, window_left=x, window_right=x),
        WINDOWS,
    ),
    "score_mod": (
        lambda q, k, v, x: foo_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s / x + x),
        DECAY,
    ),
    "mask_mod": (
        lambda q, k, v, x: foo_ops.flex_attention(q, k, v, None, lambda b, h, i, j: i - j <= x),
        WINDOWS,
    ),
    "eps": (lambda q, k, v, x: foo_ops.add_rms_norm(q, k, v[0, 0, 0], eps=x)[0], DECAY),
    "eps of layer_norm": (lambda q, k, v, x: foo_ops.layer_norm(q, k[0, 0, 0], eps=x), DECAY),
    "label_smoothing": (
        lambda q, k, v, x: foo_ops.softmax_cross_entropy(q, target_of(k), label_smoothing=x),
        SHARES,
    ),
    "ignore_index": (
        lambda q, k, v, x: foo_ops.softmax_cross_entropy(q, target_of(k), ignore_index=x),
        WINDOWS,
    ),
    "linear_cross_entropy": (
        lambda q, k, v, x: foo_ops.linear_cross_entropy(
            q, k[0, 0], target_of(k), label_smoothing=x, softcap=10 * x, ignore_index=2
        ),
        SHARES,
    ),
    "linear_cross_entropy that keeps exponentials": (
        lambda q, k, v, x: foo_ops.linear_cross_entropy(
            q, k[0, 0], target_of(k), label_smoothing=x
        ),
        SHARES,
    ),
    "ignore_index of linear_cross_entropy": (
        lambda q, k, v, x: foo_ops.linear_cross_entropy(q, k[0, 0], target_of(k), ignore_index=x),
        WINDOWS,
    ),
    "a kit's operator": (lambda q, k, v, x: capped(q, cap=x), SHARES),
    "a kit's operator in place": (
        lambda q, k, v, x: torch.ops.varying.capped_(q.clone(), cap=x),
        SHARES,
    ),
    "a kit's Scalar": (lambda q, k, v, x: blend(q, k, by=x), SHARES),
}


def results_of(function, value):
    """Return the function's results and the gradients of its tensors."""
    tensors = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(1)).unbind()
    leaves = [it.clone().requires_grad_() for it in tensors]
    torch.manual_seed(0)
    result = function(*leaves, value)
    if not result.requires_grad:
        return [result]
    return [result.detach(), *torch.autograd.grad(result.sum(), leaves, materialize_grads=True)]


@pytest.fixture
def counter():
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


@pytest.mark.parametrize("name", CASES)
def test_values_do_not_compile_anew(name, counter):
    function, values = CASES[name]
    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for value in values:
        eager, graph = results_of(function, value), results_of(compiled, value)
        torch.testing.assert_close(graph, eager, rtol=0, atol=0)
    assert counter.frame_count <= MOST_GRAPHS


def test_scale_of_flex_attention_is_one_more_product(counter):
    """The score times a varying scale is rounded before the score_mod: not equal bit for bit."""

    def function(q, k, v, scale):
        return foo_ops.flex_attention(q, k, v, lambda s, b, h, i, j: s + i - j, scale=scale)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for scale in DECAY:
        torch.testing.assert_close(results_of(compiled, scale), results_of(function, scale))
    assert counter.frame_count <= MOST_GRAPHS


def test_numbers_of_other_signs_have_graphs_of_their_own(counter):
    def function(q, k, v, cap):
        return foo_ops.attention(q, k, v, softcap=cap)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for cap in (2.0, 1.0, 0.5, 0.0, 0.25):
        torch.testing.assert_close(
            results_of(compiled, cap), results_of(function, cap), rtol=0, atol=0
        )
    assert counter.frame_count == 3


def test_a_number_is_refused_when_the_program_runs(counter):
    def function(q, k, v, dropout_p):
        return foo_ops.attention(q, k, v, dropout_p=dropout_p)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    for dropout_p in (0.1, 0.2):
        results_of(compiled, dropout_p)
    message = r"^attention: dropout_p must be at least 0 and less than 1, got 1\.5$"
    with pytest.raises(ValueError, match=message):
        results_of(compiled, 1.5)
    assert counter.frame_count == 2


def once(x, by):
    return by * x


def twice(x, by):
    return 2.0 * by * x


def test_an_operator_that_is_defined_again_has_its_own_kernel(counter):
    """As in a notebook; the operator with numbers in tensors is redefined, too."""
    for factor, function in ((1.0, once), (2.0, twice)):
        library.define("varying::times", "(Tensor x, float by) -> Tensor")
        library.register_kernel("varying::times", "cpu", library.elementwise_kernel(function))
        torch.compiler.reset()
        compiled = torch.compile(torch.ops.varying.times, backend=counter, fullgraph=True)
        for by in DECAY:
            expected = torch.full((3,), factor * by)
            torch.testing.assert_close(compiled(torch.ones(3), by), expected)
    assert counter.frame_count <= 2 * MOST_GRAPHS
