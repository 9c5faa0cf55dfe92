"""Results do not depend on the number of threads; threads compile at once; compile counts."""

import functools
import threading

import pytest
import torch
from support.flex_exact import Tensors, assert_results, cotangents_of, exact_of, qkv, results_of
from support.flex_variants import BATCH, HEADS, KEYS, QUERIES, SIZES, VARIANTS
from support.parts import whole
from support.processes import python, run
from torch.nn.attention.flex_attention import create_block_mask

import foo_ops
from foo_ops.testing.checks.matrix import threads

DTYPE = torch.float32


def results(score_mod, mask_mod, inputs, captured):
    call = functools.partial(
        foo_ops.flex_attention,
        score_mod=score_mod,
        block_mask=mask_mod,
        enable_gqa=True,
        return_lse=True,
    )
    return results_of(call, inputs, captured, cotangents_of(inputs[0], inputs[2], DTYPE))


def assert_the_same_on_threads(score_mod, mask_mod, inputs, captured):
    """Compare all bits with those of one thread."""
    with threads(1):
        expected = results(score_mod, mask_mod, inputs, captured)
    for count in (2, 3, 5):
        with threads(count):
            found = results(score_mod, mask_mod, inputs, captured)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), count
    return expected


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_on_threads(name, device):
    tensors = Tensors(device, DTYPE)
    functions = VARIANTS[name](tensors.new, tensors.integers)
    assert_the_same_on_threads(*functions, qkv(SIZES, DTYPE, device), tensors.made)


# Sizes of a table that all batch rows and heads add to: within the limit for separate sums, and
# beyond it, 16777216 elements for all of them.
SUMS = {"apart": 600, "beyond the room": 2**21 + 3}


@pytest.mark.parametrize("sums", SUMS)
@pytest.mark.parametrize("index", ["nothing", "batch", "head", "both"])
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_gradients_of_captured_tensors_on_threads(index, sums, device):
    """Batch rows and heads all add to elements that are shared by them."""
    sizes = (2, 4, 200, 300)
    count = SUMS[sums]
    shape = {"nothing": (count,), "batch": (2, count), "head": (4, count), "both": (2, 4, count)}
    ours, exact = Tensors(device, DTYPE), Tensors("cpu", torch.float64, DTYPE)
    tables = [it.new(*shape[index]) for it in (ours, exact)]

    own = {
        "nothing": lambda b, h: (),
        "batch": lambda b, h: (b,),
        "head": lambda b, h: (h,),
        "both": lambda b, h: (b, h),
    }[index]

    def make(table):
        return lambda score, b, h, q, k: score + table[(*own(b, h), q - k + 300)]

    inputs = qkv(sizes, DTYPE, device, key_heads=4)
    found = assert_the_same_on_threads(make(tables[0]), None, inputs, ours.made)
    cotangents = cotangents_of(inputs[0], inputs[2], DTYPE)
    assert_results(found, exact_of(inputs, exact.made, cotangents, make(tables[1])), DTYPE)


def test_large_tables_that_belong_to_no_head_with_shared_key_heads(device):
    sizes = (2, 4, 140, 260)
    ours, exact = Tensors(device, DTYPE), Tensors("cpu", torch.float64, DTYPE)
    tables = [it.new(2**22 + 1) for it in (ours, exact)]
    functions = [lambda s, b, h, q, k, t=it: s * t[2**21 + q - 2 * k] for it in tables]
    inputs = qkv(sizes, DTYPE, device, key_heads=2)
    found = assert_the_same_on_threads(functions[0], None, inputs, ours.made)
    cotangents = cotangents_of(inputs[0], inputs[2], DTYPE)
    assert_results(found, exact_of(inputs, exact.made, cotangents, functions[1]), DTYPE)


def test_eight_threads_compile_different_functions(device):
    """Threads have functions of their own, forward and backward, and share two."""
    errors = []

    def work(number):
        try:
            tensors, exact = Tensors(device, DTYPE), Tensors("cpu", torch.float64, DTYPE)
            functions = [make_chain(number % 6, it.new(HEADS, KEYS)) for it in (tensors, exact)]
            inputs = qkv((1, HEADS, 20, 30), DTYPE, device)
            found = results(*functions[0], inputs, tensors.made)
            cotangents = cotangents_of(inputs[0], inputs[2], DTYPE)
            assert_results(found, exact_of(inputs, exact.made, cotangents, *functions[1]), DTYPE)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


def make_chain(length, table):
    """Return functions whose programs differ for each length."""

    def score_mod(score, b, h, q, k):
        for _ in range(length):
            score = torch.tanh(score) + table[h, k]
        return score + table[h, (q + k) % KEYS]

    def mask_mod(b, h, q, k):
        sees = q >= 0
        for step in range(length):
            sees = sees & (q + 11 * step + 3 != k)
        return sees

    return score_mod, mask_mod


# Compiled programs and kernels appear as files in a separate cache.
COMPILES = """
import os
import sys
import torch
import foo_ops
from torch.nn.attention.flex_attention import create_block_mask

device = sys.argv[1]

def files():
    return {name for name in os.listdir(os.environ["FOO_CACHE_DIR"]) if name.endswith(".o")}

def make(slope, cap, width, table):
    def score_mod(score, b, h, q, k):
        return cap * torch.tanh((score + slope * (q - k) + table[h, k]) / cap)

    return score_mod, lambda b, h, q, k: (q - k).abs() < width

def step(queries, keys, *options, heads=2, by_blocks=False):
    table = torch.randn(heads, keys + 7, device=device, requires_grad=True)
    score_mod, mask = make(*options, table)
    if by_blocks:
        mask = create_block_mask(mask, 1, 1, queries, keys, device=device)
    query = torch.randn(2, heads, queries, 16, device=device, requires_grad=True)
    key, value = torch.randn(2, 2, heads, keys, 16, device=device).unbind()
    output = foo_ops.flex_attention(query, key, value, score_mod, mask)
    torch.autograd.grad(output.sum(), (query, table))

step(200, 300, 0.5, 3.0, 20)
first = files()
assert any("program" in name for name in first), first
step(200, 300, -1.25, 7.5, 100)
step(131, 290, 0.1, 2.0, 50, heads=5)
step(140, 400, 0.1, 2.0, 50, by_blocks=True)
assert files() == first, files() - first
"""


@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_one_compile_for_a_function(device, tmp_path):
    """New numbers, tensors, lengths, or a redefinition of the function compile nothing."""
    run(COMPILES, tmp_path, device)


MEMORY = """
import resource
import sys
import torch
import foo_ops
from torch.nn.attention.flex_attention import BlockMask

device, by_blocks = sys.argv[1], sys.argv[2] == "True"
table = torch.zeros(1, 2048, device=device, requires_grad=True)

def score_mod(score, b, h, q, k):
    return score + table[h, (q - k) % 2048]

def sees(b, h, q, k):
    return (q >= k) & (q - k < 200)

def step(length):
    query, key, value = (
        torch.randn(1, 1, length, 16).to(device).requires_grad_() for _ in range(3)
    )
    mask = sees
    if by_blocks:
        rows = -(-length // 128)
        indices = torch.arange(rows, dtype=torch.int32, device=device)
        indices = (indices[:, None] - torch.arange(3, device=device)).clamp(0).int()
        counts = torch.full((1, 1, rows), 3, dtype=torch.int32, device=device)
        mask = BlockMask.from_kv_blocks(
            counts, indices[None, None], mask_mod=sees, seq_lengths=(length, length),
            compute_q_blocks=False,
        )
    output, lse = foo_ops.flex_attention(query, key, value, score_mod, mask, return_lse=True)
    (output.sum() + lse.sum()).backward()
    assert all(it.grad.isfinite().all() for it in (query, key, value, table))

step(300)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
step(32768)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("by_blocks", [True, False])
def test_memory_grows_with_the_length(by_blocks, device):
    """A score matrix of length 32768 would need 4 GiB; all tensors together have 14 MiB."""
    process = python(MEMORY, device, by_blocks)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) < 64 * 1024


def test_masks_of_blocks_on_threads(device):
    tensors = Tensors(device, DTYPE)
    score_mod, mask_mod = VARIANTS["documents_with_alibi"](tensors.new, tensors.integers)
    shape = (BATCH, HEADS, QUERIES, KEYS)
    mask = create_block_mask(mask_mod, *shape, device=device, BLOCK_SIZE=(16, 32))
    assert_the_same_on_threads(score_mod, mask, qkv(SIZES, DTYPE, device), tensors.made)
