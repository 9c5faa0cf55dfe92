"""Large results use huge pages, so that the first touch of their memory costs little."""

import functools
import mmap
from pathlib import Path

import pytest
import torch

import foo_ops

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")

pytestmark = pytest.mark.skipif(not SETTING.exists(), reason="the system has no huge pages")

# The C library allocates more than 32 MB by a new mapping, which has no advice yet.
ELEMENTS = 9 << 20
ROWS, WIDTH = ELEMENTS >> 10, 1 << 10
HEAD, ONE_KEY = (1, 1, ELEMENTS >> 6, 64), torch.ones(1, 1, 1, 64)


def matrix(rows=ROWS, width=WIDTH, **options):
    return torch.ones(rows, width, **options)


def gradients(function, *tensors):
    leaves = [tensor.requires_grad_() for tensor in tensors]
    output = function(*leaves)
    return torch.autograd.grad(output, leaves, torch.ones(()).expand_as(output))


def packed(attend):
    tokens, key = HEAD[2], torch.ones(1, 1, 64)
    starts, key_starts = (torch.tensor([0, end], dtype=torch.int32) for end in (tokens, 1))
    lengths = {"max_seqlen_q": tokens, "max_seqlen_k": 1}
    return attend(torch.ones(tokens, 1, 64), key, key, starts, key_starts, **lengths)


def attended(query, key):
    return foo_ops.attention(query, key, key)


def bias_gradient():
    tokens = torch.ones(1, 1, 3 << 10, 64)
    bias = torch.zeros(1, 1, 3 << 10, 3 << 10, requires_grad=True)
    output = foo_ops.attention(tokens, tokens, tokens, attn_bias=bias)
    return torch.autograd.grad(output.sum(), bias)


def loss_gradients():
    target = torch.zeros(2, dtype=torch.int64)
    weight = matrix(requires_grad=True)
    loss = foo_ops.linear_cross_entropy(torch.ones(2, WIDTH), weight, target)
    return torch.autograd.grad(loss, weight)


def kept_exponentials():
    hidden, target = torch.ones(ROWS, ROWS), torch.zeros(ROWS, dtype=torch.int64)
    operator = torch.ops.foo.linear_cross_entropy_training
    return operator(hidden, torch.ones(WIDTH, ROWS), target)[3:4]


@functools.cache
def two_results():
    @foo_ops.library.numba_op("huge_pages::halves")
    def halves(x: float) -> tuple[float, int]:
        return x / 2, int(x)

    return halves


RESULTS = {
    "elementwise": lambda: foo_ops.abs(matrix()),
    "elementwise, strided": lambda: foo_ops.abs(matrix().t()),
    "elementwise, of several dtypes": lambda: two_results()(matrix().t()),
    "elementwise, gradient": lambda: gradients(foo_ops.abs, matrix()),
    "tile": lambda: foo_ops.rms_norm(matrix(), torch.ones(WIDTH)),
    "linear": lambda: foo_ops.linear(matrix(width=1), torch.ones(WIDTH, 1)),
    "linear, gradients": lambda: gradients(foo_ops.linear, matrix(), matrix(1))[:1],
    "linear, gradient of the weight": lambda: gradients(foo_ops.linear, matrix(1), matrix())[1:],
    "attention": lambda: attended(torch.ones(HEAD), ONE_KEY),
    "attention, gradient": lambda: gradients(attended, torch.ones(HEAD), ONE_KEY)[:1],
    "attention, gradient of a bias": bias_gradient,
    "attention, packed": lambda: packed(foo_ops.attention_varlen),
    "flex attention": lambda: foo_ops.flex_attention(torch.ones(HEAD), ONE_KEY, ONE_KEY),
    "flex attention, packed": lambda: packed(foo_ops.flex_attention_varlen),
    "loss, gradient": loss_gradients,
    "loss, what is kept": kept_exponentials,
}


def advice(address):
    """Return the flags of the mapping that contains an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split(maxsplit=1)
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:x}")


def tensors_of(results):
    return (results,) if isinstance(results, torch.Tensor) else results


def advice_at_middle(tensor):
    storage = tensor.untyped_storage()
    return advice(storage.data_ptr() + storage.nbytes() // 2)


@pytest.mark.parametrize("name", RESULTS)
def test_large_results_ask_for_huge_pages(name):
    for tensor in tensors_of(RESULTS[name]()):
        size, flags = tensor.untyped_storage().nbytes(), advice_at_middle(tensor)
        assert size > 32 << 20
        assert "hg" in flags


def test_given_results_get_no_advice():
    # A new mapping: memory of an earlier result may still have that result's advice.
    memory = mmap.mmap(-1, 4 * ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = torch.frombuffer(memory, dtype=torch.float32)
    torch.ops.foo.abs.out(torch.ones(ELEMENTS), out=out)
    flags = advice_at_middle(out)
    assert "hg" not in flags
