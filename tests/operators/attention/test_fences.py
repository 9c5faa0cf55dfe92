"""No attention kernel writes outside its regions of memory."""

import ctypes

import pytest
import torch
from support.parts import whole
from support.processes import run

from foo_ops.kernels.compiler.cache import cache_directory
from foo_ops.kernels.compiler.resolve import resolve
from foo_ops.kernels.simd.types import compute_dtype

# Each kernel call goes through `checked`, which fills the fences between the parts of scratch
# memory before the call and checks them afterwards. Sums of keys and values are moved to fenced
# memory meanwhile. Arguments: a dtype, and which region is too small, if any.
FENCED = """
import ctypes
import functools
import importlib
import random
import sys
import numpy as np
import torch
from foo_ops.kernels.attention import operands as attention
from foo_ops.kernels.lang import scratch
from foo_ops.kernels.compiler import resolve as resolving
from foo_ops.kernels.compiler.kernel import KERNELS
from foo_ops.testing import ATTENTION, ATTENTION_VARLEN, cotangents_for

scratch.FENCE = 1024
PATTERN = {"float32": np.uint32(0xFFC0BEEF), "float64": np.uint64(0xFFF8DEADBEEFBEEF)}
FUNCTION = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)
resolve, kept_alive, broken, called = resolving.resolve, [], set(), set()


def structure(struct):
    def c_type(type_):
        return ctypes.c_double if str(type_) == "float64" else ctypes.c_int64

    fields = [(name, c_type(type_)) for name, type_ in struct.fields.items()]
    return type(struct.name, (ctypes.Structure,), {"_fields_": fields})


def array_at(address, count, dtype):
    pattern = PATTERN[dtype]
    memory = (ctypes.c_char * (count * pattern.nbytes)).from_address(address)
    return np.frombuffer(memory, dtype=pattern.dtype)


class Sums:
    # The slot of grad_key or grad_value that a block adds to, moved.
    def __init__(self, parameters, name, slot, dtype):
        self.parameters, self.name, self.address = parameters, name, getattr(parameters, name)
        self.pattern = PATTERN[dtype]
        stride = getattr(parameters, f"{name}_batch_stride")
        self.source = array_at(self.address + slot * stride * self.pattern.nbytes, stride, dtype)
        self.moved = np.full(stride + 2 * scratch.FENCE, self.pattern)
        self.inside = self.moved[scratch.FENCE : -scratch.FENCE]
        self.inside[:] = self.source
        first = self.inside.ctypes.data - slot * stride * self.pattern.nbytes
        setattr(parameters, name, first)

    def put_back(self):
        setattr(self.parameters, self.name, self.address)
        self.source[:] = self.inside
        fences = self.moved[: scratch.FENCE], self.moved[-scratch.FENCE :]
        return all((fence == self.pattern).all() for fence in fences)


def fences_of(layout, sizes, memory):
    parts, total = layout.offsets(sizes)
    elements, fences = array_at(memory, total, layout.dtype), {"the beginning": 0}
    fences |= {name: start + count for name, (start, count) in parts.items()}
    return {name: elements[start : start + scratch.FENCE] for name, start in fences.items()}


def checked(kernel, signature):
    maker = KERNELS[kernel].maker
    make_scratch = maker.function.replace("_kernel", "_scratch")
    function = FUNCTION(resolve(kernel, signature))
    layout = getattr(importlib.import_module(maker.module), make_scratch)(signature)
    parameters_type, piece_type = map(structure, attention.argument_types(signature)[:2])

    def call(parameters, piece, memory, bytes):
        if bytes:
            return function(parameters, piece, memory, bytes)
        called.add(kernel)
        fields = parameters_type.from_address(parameters)
        block = piece_type.from_address(piece)
        sizes = layout.sizes_of.py_func(fields, block)
        fences = fences_of(layout, sizes, memory)
        for fence in fences.values():
            fence[:] = PATTERN[layout.dtype]
        sums = []
        if kernel.startswith("attention_backward"):
            names = ("grad_key", "grad_value")
            sums = [Sums(fields, operand, block.sums, layout.dtype) for operand in names]
        function(parameters, piece, memory, None)
        for part, fence in fences.items():
            if (fence != PATTERN[layout.dtype]).any():
                broken.add((kernel, f"behind {part}", sizes))
        for moved in sums:
            if not moved.put_back():
                broken.add((kernel, f"outside of {moved.name}", sizes))

    kept_alive.append(FUNCTION(call))
    return ctypes.cast(kept_alive[-1], ctypes.c_void_p).value


def resolve_checked(kernel, signature):
    has_scratch = kernel.startswith("attention_") and kernel != "attention_sum_chunks"
    return checked(kernel, signature) if has_scratch else resolve(kernel, signature)


def run(call, *tensors):
    inputs = [tensor.requires_grad_() for tensor in tensors if tensor.is_floating_point()]
    output, logsumexp = call(*tensors)
    (output.sum() + logsumexp.clamp(-1, 1).sum()).backward()


def run_shapes(dtype):
    chosen = random.Random(str(dtype))
    dims = (1, 3, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 192, 255, 257, 300)
    lengths = (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 65, 95, 97, 127, 128, 129, 145, 177, 200)
    for head_dim in dims:
        for value_dim in (head_dim, chosen.choice(dims)):
            queries, keys = chosen.choices(lengths, k=2)
            group, heads = chosen.choice((1, 1, 3, 4)), chosen.choice((1, 2))
            query = torch.randn(1, heads * group, queries, head_dim).to(dtype)
            key = torch.randn(1, heads, keys, head_dim).to(dtype)
            value = torch.randn(1, heads, keys, value_dim).to(dtype)
            # A common option or every one: with all dtypes and widths both meet most sizes.
            options = chosen.choice(options_for(chosen, heads * group, queries, keys, dtype))
            run(functools.partial(torch.ops.foo.attention, **options), query, key, value)
    # Blocks of many queries, and split keys.
    for shape in ((1, 1, 2100, 16), (1, 1, 1500, 33)):
        query, key, value = torch.randn(3, *shape).to(dtype).unbind()
        run(torch.ops.foo.attention, query, key, value)
    for queries in (1, 8, 100):
        query = torch.randn(1, 2, queries, 40).to(dtype)
        key, value = torch.randn(2, 1, 1, 3000, 40).to(dtype).unbind()
        run(torch.ops.foo.attention, query, key, value)


def options_for(chosen, heads, queries, keys, dtype):
    sinks = torch.randn(heads).to(dtype)
    window = {"window_left": chosen.choice((0, 5, 40)), "window_right": chosen.choice((0, 3))}
    common = chosen.choice(({}, {"is_causal": True}, window, {"sinks": sinks}))
    bias_shape = (1, heads, chosen.choice((1, queries)), chosen.choice((1, keys)))
    every = {
        "attn_bias": torch.randn(bias_shape).to(dtype).requires_grad_(),
        "alibi_slopes": torch.rand(heads).requires_grad_(),
        "sinks": sinks,
        "softcap": chosen.choice((0.0, 5.0)),
        "dropout_p": chosen.choice((0.0, 0.3)),
        "is_causal": chosen.choice((False, True)),
    }
    return common, every


def run_samples(dtype):
    for spec in (ATTENTION, ATTENTION_VARLEN):
        for make in spec.samples.values():
            sample = make(dtype).requiring_grad()
            outputs = sample.call(spec.operator)
            torch.autograd.grad(outputs, sample.differentiable(), cotangents_for(outputs))


resolving.resolve = resolve_checked
torch.manual_seed(0)
torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[1])
if len(sys.argv) > 2:
    module, name, value = sys.argv[2].split(",")
    setattr(importlib.import_module(f"foo_ops.kernels.attention.{module}"), name, int(value))
run_samples(dtype)
if len(sys.argv) == 2:
    run_shapes(dtype)
    if dtype in (torch.float32, torch.float64):
        seed = torch.tensor([3])
        torch.ops.foo.attention_dropout_mask(seed, (1, 2, 150, 300), dropout_p=0.5, dtype=dtype)
for kernel, where, sizes in sorted(broken):
    print(kernel, where, *sizes)
print(*sorted(called))
"""

EVERY_KERNEL = (
    *("attention_backward", "attention_backward.without_options"),
    *("attention_decode", "attention_decode.without_options"),
    *("attention_forward", "attention_forward.without_options", "attention_merge"),
)


def lines(cache, *arguments, **environment):
    return run(FENCED, cache, *arguments, **environment)[0].splitlines()


@pytest.mark.parametrize(
    ("dtype", "environment"),
    [
        ("float32", {}),
        ("bfloat16", {}),
        *whole(
            ("float64", {}),
            ("float16", {}),
            ("float32", {"FOO_VECTOR_BITS": "128"}),
            ("float16", {"FOO_VECTOR_BITS": "256"}),
            ("bfloat16", {"FOO_BFLOAT16_PAIRS": "0", "FOO_MATRIX_UNIT": "0"}),
            ("bfloat16", {"FOO_BFLOAT16_PAIRS": "1", "FOO_VECTOR_BITS": "256"}),
            ("bfloat16", {"FOO_MATRIX_UNIT": "1"}),
            ("float16", {"FOO_MATRIX_UNIT": "1", "FOO_VECTOR_BITS": "256"}),
            ("float32", {"FOO_MATRIX_UNIT": "1"}),
        ),
    ],
    ids=str,
)
def test_no_part_of_scratch_memory_is_too_small(dtype, environment):
    *broken, called = lines(cache_directory() / "fenced", dtype, **environment)
    assert broken == []
    dropout_mask = ("attention_dropout_mask",) if dtype in ("float32", "float64") else ()
    assert called.split() == sorted((*EVERY_KERNEL, *dropout_mask))


@pytest.mark.whole
def test_a_part_that_is_too_small_would_be_noticed(tmp_path):
    *broken, _ = lines(tmp_path, "float32", "forward,QUERY_BLOCK,1")
    assert any(line.startswith("attention_merge behind largest") for line in broken)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_sums_of_chunks_stay_inside(dtype):
    compute = getattr(torch, compute_dtype(dtype))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    types = (pointer, number, pointer, *[number] * 5, ctypes.c_double)
    sum_chunks = ctypes.CFUNCTYPE(None, *types)(resolve("attention_sum_chunks", dtype))
    for columns in (1, 3, 8, 17, 64, 100, 300):
        width = -(-columns // 16) * 16
        for rows, chunks, extra in ((1, 1, 0), (7, 3, 5), (33, 8, 0)):
            sums = torch.randn(chunks, rows + 2, width, dtype=compute)
            expected = (sums[:, 1:-1, :columns].double().sum(0) * 0.5).to(sums.dtype)
            before = sums.clone()
            gradient = torch.full((rows + 2, columns + extra), 7.0, dtype=getattr(torch, dtype))
            sum_chunks(
                gradient[1].data_ptr(), gradient.stride(0), sums[0, 1].data_ptr(), sums.stride(0),
                width, rows, columns, chunks, 0.5,
            )  # fmt: skip
            written = torch.zeros_like(gradient, dtype=torch.bool)
            written[1:-1, :columns] = True
            assert (gradient[~written] == 7.0).all()
            torch.testing.assert_close(gradient[1:-1, :columns], expected.to(gradient.dtype))
            changed = sums != before
            changed[0, 1:-1] = False
            assert not changed.any()


# Keys and values end where a page ends; reading the page behind it ends the process.
AT_THE_END_OF_A_PAGE = """
import ctypes
import mmap
import torch
import foo_ops

PAGE, NO_ACCESS = mmap.PAGESIZE, 0
libc = ctypes.CDLL(None, use_errno=True)
kept_alive = []


def at_the_end(tensor):
    bytes = tensor.numel() * tensor.element_size()
    pages = -(-bytes // PAGE)
    memory = mmap.mmap(-1, (pages + 1) * PAGE)
    kept_alive.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    behind = ctypes.c_void_p(whole.data_ptr() + pages * PAGE)
    assert libc.mprotect(behind, ctypes.c_size_t(PAGE), NO_ACCESS) == 0
    last = whole[pages * PAGE - bytes : pages * PAGE].view(tensor.dtype).view(tensor.shape)
    return last.copy_(tensor)


for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
    for columns in (2, 4, 20, 34, 80):
        for heads, queries in ((1, 1), (4, 1), (2, 3)):
            query = torch.randn(1, heads, queries, columns, dtype=dtype)
            key, value = (at_the_end(it) for it in torch.randn(2, 1, 1, 7, columns, dtype=dtype))
            output = foo_ops.attention(query, key, value)
            assert output.equal(foo_ops.attention(query, key.clone(), value.clone()))
print("done")
"""


def test_nothing_is_read_behind_keys_and_values():
    assert run(AT_THE_END_OF_A_PAGE, cache_directory())[0] == "done"
