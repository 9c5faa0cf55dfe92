"""Large results have huge pages, and the memory of freed ones is used again."""

import functools
import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.forked import in_threads, succeeds
from support.processes import python

import foo_ops
from foo_ops import _C

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_huge_pages = pytest.mark.skipif(not SETTING.exists(), reason="the system has no huge pages")

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


def fact_of_mapping(address, name):
    """Return the words of a line about the mapping that contains an address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *_ = line.split(maxsplit=1)
        if "-" in first and not first.endswith(":"):
            begin, end = (int(number, 16) for number in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == f"{name}:":
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:x}")


def tensors_of(results):
    return (results,) if isinstance(results, torch.Tensor) else results


def advice_at_middle(tensor):
    storage = tensor.untyped_storage()
    return fact_of_mapping(storage.data_ptr() + storage.nbytes() // 2, "VmFlags")


@has_huge_pages
@pytest.mark.parametrize("name", RESULTS)
def test_large_results_ask_for_huge_pages(name):
    for tensor in tensors_of(RESULTS[name]()):
        size, flags = tensor.untyped_storage().nbytes(), advice_at_middle(tensor)
        assert size > 32 << 20
        assert "hg" in flags


@has_huge_pages
def test_given_results_get_no_advice():
    # A new mapping: memory of an earlier result may still have that result's advice.
    memory = mmap.mmap(-1, 4 * ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    out = torch.frombuffer(memory, dtype=torch.float32)
    torch.ops.foo.abs.out(torch.ones(ELEMENTS), out=out)
    flags = advice_at_middle(out)
    assert "hg" not in flags


# -------------------------------------------------------------------------- memory is used again

MEGABYTES = 1 << 20


@pytest.fixture
def nothing_waits():
    _C.release_result_memory()
    assert _C.result_memory()[0] == 0


def negated(megabytes, number=1.0):
    return foo_ops.abs(torch.full((megabytes * MEGABYTES // 4,), -number))


@pytest.mark.parametrize("name", RESULTS)
def test_a_freed_result_leaves_its_memory_to_the_next(nothing_waits, name):
    RESULTS[name]()
    waiting, _ = _C.result_memory()
    assert waiting >= 32 * MEGABYTES
    results = RESULTS[name]()
    assert _C.result_memory()[0] <= waiting - 32 * MEGABYTES
    del results
    assert _C.result_memory()[0] == waiting


def test_results_that_live_have_memory_of_their_own(nothing_waits):
    kept = negated(8, 2.0)[-1:]
    others = [negated(8, number) for number in (3.0, 4.0)]
    assert kept.item() == 2
    assert [it.unique().tolist() for it in others] == [[3.0], [4.0]]


def test_a_much_larger_block_is_left_to_larger_results(nothing_waits):
    large = negated(64)
    place = large.data_ptr()
    del large
    assert negated(8).data_ptr() != place
    assert negated(52).data_ptr() == place


def test_small_results_are_of_pytorchs_allocator(nothing_waits):
    negated(2)
    assert _C.result_memory()[0] == 0


def freed_lazily(place):
    amount, unit = fact_of_mapping(place, "LazyFree")
    assert unit == "kB"
    return int(amount) << 10


def test_the_system_may_take_the_pages_of_memory_that_waits_long(nothing_waits):
    """The 64 MB that were freed last stay, since the next results are likely to take them."""
    first, second, third = (negated(size) for size in (16, 56, 8))
    places = [it.data_ptr() for it in (first, second, third)]
    del first
    assert freed_lazily(places[0]) == 0
    del second
    assert freed_lazily(places[0]) >= 15 * MEGABYTES
    del third
    assert [freed_lazily(it) for it in places[1:]] == [0, 0]
    again = negated(56, 2.0)
    assert again.data_ptr() == places[1]
    again = negated(16, 3.0)
    assert again.data_ptr() == places[0]
    assert again.unique().tolist() == [3.0]


def test_the_system_may_take_the_pages_of_a_large_block_at_once(nothing_waits):
    result = negated(80)
    place = result.data_ptr()
    del result
    assert freed_lazily(place) >= 79 * MEGABYTES


WAITING = """
import torch, foo_ops
from foo_ops import _C

results = [foo_ops.abs(torch.ones(size << 18)) for size in (8, 16, 24)]
while results:
    del results[0]
print(_C.result_memory()[0] >> 20)
"""


@pytest.mark.parametrize(
    ("limit", "waiting"), [("0", 0), ("24M", 24), ("40M", 40), ("47M", 40), ("1G", 48)]
)
def test_memory_that_waits_has_a_limit(limit, waiting):
    process = python(WAITING, FOO_RESULT_MEMORY=limit)
    assert process.stdout.strip() == str(waiting), process.stderr


def test_the_limit_is_a_16th_of_the_machine_if_nothing_is_said():
    code = "import torch, foo_ops; print(foo_ops._C.result_memory()[1])"
    variables = {name: it for name, it in os.environ.items() if name != "FOO_RESULT_MEMORY"}
    limit = subprocess.check_output([sys.executable, "-c", code], env=variables)
    assert int(limit) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16


@pytest.mark.parametrize("limit", ["", "all", "-1", "1 G", "1T", "1GB", "99999999999G"])
def test_a_wrong_limit_is_refused(limit):
    process = python(WAITING, FOO_RESULT_MEMORY=limit)
    expected = (
        "ValueError: FOO_RESULT_MEMORY must be a number of bytes, such as 1000000, 512M or 2G"
    )
    assert f"{expected}, got '{limit}'" in process.stderr


def test_threads_get_separate_memory():
    numbers = itertools.count(1)

    def work():
        thread = next(numbers)
        for step in range(6):
            value = float(10 * thread + step)
            assert negated(4 + step % 3, value).unique().tolist() == [value]

    in_threads(work)


def test_a_forked_child_does_not_write_to_its_parents_results(nothing_waits):
    kept = negated(8, 7.0)
    negated(8)

    def overwrite_memory_that_waits():
        assert _C.result_memory()[0] == 8 * MEGABYTES
        assert foo_ops.abs(torch.full((4,), -5.0)).tolist() == [5.0] * 4
        torch.set_num_threads(1)
        assert negated(8, 5.0).unique().tolist() == [5.0]

    assert succeeds(overwrite_memory_that_waits)
    assert kept.unique().tolist() == [7.0]


def test_storages_can_be_resized_shared_and_read_by_numpy(nothing_waits):
    result = negated(8, 3.0)
    result.resize_(4 * MEGABYTES)
    assert result[: 2 * MEGABYTES].unique().tolist() == [3.0]
    shared = negated(8, 4.0).share_memory_()
    array = negated(8, 5.0).numpy()
    others = [negated(8, 6.0) for _ in range(3)]
    assert shared.unique().tolist() == [4.0]
    assert array.min() == array.max() == 5
    assert all(it.unique().tolist() == [6.0] for it in others)


def test_results_are_filled_where_pytorch_fills_new_memory(nothing_waits):
    negated(8)
    torch.use_deterministic_algorithms(True)
    try:
        result = torch.ops.foo.abs.default(torch.ones(2 * MEGABYTES))
    finally:
        torch.use_deterministic_algorithms(False)
    assert result.unique().tolist() == [1.0]


def test_the_profiler_sees_the_memory(nothing_waits):
    x = torch.ones(2 * MEGABYTES)
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True) as profile:
            foo_ops.abs(x)
        sizes = [event.cpu_memory_usage for event in profile.events()]
        assert 8 * MEGABYTES in sizes
        assert -8 * MEGABYTES in sizes
