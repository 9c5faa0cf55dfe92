"""Arguments that an operator writes, with their conjugate or negative bit set."""

import pytest
import torch

from foo_ops import library

NAMESPACE = "foo_math_bits"
VIEWS = {
    "negative": torch._neg_view,
    "conjugate": torch.conj,
    "both": lambda x: torch._neg_view(x.conj()),
}


def doubled(x, tiles):
    for row in tiles:
        for i in range(x.shape[-1]):
            x[row, i] = x[row, i] * 2.0


@pytest.fixture(scope="module")
def operators():
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as lib:
        lib.define("double(Tensor(a!) x) -> ()")
        lib.define("triple_(Tensor(a!) x) -> Tensor(a!)")
        lib.define("triple(Tensor x) -> Tensor")
        lib.define("triple.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
        lib.define("add_to(Tensor(a!) x, Tensor y) -> ()")
        library.register_fake(f"{NAMESPACE}::double", lambda x: None, lib=lib)
        library.register_fake(f"{NAMESPACE}::add_to", lambda x, y: None, lib=lib)
        for_both = ("cpu", "foo")
        library.register_kernel(
            f"{NAMESPACE}::double", for_both, library.tile_kernel(doubled), lib=lib
        )

        @library.tile_kernel
        def add_to(x, y, tiles):
            for row in tiles:
                for i in range(x.shape[-1]):
                    x[row, i] = x[row, i] + y[row, i]

        library.register_kernel(f"{NAMESPACE}::add_to", for_both, add_to, lib=lib)
        triple = library.elementwise_kernel(lambda x: 3.0 * x, dtypes=[torch.complex64])
        for name in ("triple", "triple_", "triple.out"):
            library.register_kernel(f"{NAMESPACE}::{name}", for_both, triple, lib=lib)
        yield torch.ops.foo_math_bits


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("view", VIEWS)
def test_written_without_being_returned(operators, view, device):
    base = torch.tensor([[1 + 2j, -3j], [0.5, 4 - 1j]], dtype=torch.complex64)
    x = VIEWS[view](base.to(device))
    wanted = VIEWS[view](base.to(torch.complex128)).resolve_conj().resolve_neg() * 2
    assert x.is_conj() or x.is_neg()
    version = x._version
    # PyTorch's own fallback freed the wrong memory, which later allocations reveal.
    for _ in range(3):
        assert operators.double(x) is None
    torch.testing.assert_close(x.cpu().to(torch.complex128), wanted * 4)
    assert x._version > version


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("view", VIEWS)
def test_written_beside_what_is_read(operators, view, device):
    x, y = (VIEWS[view](torch.randn(2, 3, dtype=torch.complex64, device=device)) for _ in range(2))
    wanted = x.cpu().to(torch.complex128) + y.cpu().to(torch.complex128)
    read = y.cpu()
    operators.add_to(x, y)
    torch.testing.assert_close(x.cpu().to(torch.complex128), wanted)
    assert torch.equal(y.cpu(), read)


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("view", VIEWS)
def test_written_and_returned(operators, view, device):
    base = torch.randn(5, dtype=torch.complex64, device=device)
    x = VIEWS[view](base.clone())
    wanted = x.cpu().to(torch.complex128) * 3
    assert operators.triple_(x) is x
    torch.testing.assert_close(x.cpu().to(torch.complex128), wanted)
    # With another shape, it is resized like any argument ``out``.
    out = VIEWS[view](torch.zeros(0, dtype=torch.complex64, device=device))
    assert operators.triple(base, out=out) is out
    torch.testing.assert_close(out.cpu().to(torch.complex128), base.cpu().to(torch.complex128) * 3)


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("negated", ["key", "value", "both"])
def test_caches(negated, device):
    key_cache, value_cache = torch.zeros(2, 1, 1, 4, 2, device=device).unbind()
    if negated != "value":
        key_cache = torch._neg_view(key_cache)
    if negated != "key":
        value_cache = torch._neg_view(value_cache)
    new = torch.full((1, 1, 2, 2), 3.0, device=device)
    torch.ops.foo.cache_append(
        key_cache, value_cache, new, new * 2, torch.tensor([1], device=device)
    )
    for cache, value in ((key_cache, 3.0), (value_cache, 6.0)):
        wanted = torch.tensor([0.0, value, value, 0.0])[:, None].expand(4, 2)
        torch.testing.assert_close(cache[0, 0].cpu(), wanted)


def test_nothing_is_written_where_the_call_is_refused():
    key_cache, value_cache = (torch._neg_view(torch.zeros(1, 1, 4, 2)) for _ in range(2))
    new = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="positions must be in"):
        torch.ops.foo.cache_append(key_cache, value_cache, new, new, torch.tensor([3]))
    assert not key_cache.any()
    assert not value_cache.any()
