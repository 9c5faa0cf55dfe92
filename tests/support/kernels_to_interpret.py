"""Kernels that run compiled and interpreted: ``python kernels_to_interpret.py FILE``."""

import math
import sys

import torch

from foo_ops import language, library

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@library.numba_op("interpreted::blend", backward=lambda grad, a, b, weight: (grad, weight * grad))
def blend(a: float, b: float, weight: float = 0.3) -> float:
    return a + weight * (b - a) / (b + 0.5)


@library.numba_op("interpreted::kept")
def kept(x: float, mask: bool, count: int, bound: int | None = None) -> tuple[float, bool]:
    if bound is not None and count > bound:
        return 0.0, True
    return x / 0.0 if mask else math.floor(math.sqrt(x) ** 2), mask and count // 2 > 1


library.define("interpreted::scale_", "(Tensor(a!) x, Tensor scale) -> Tensor(a!)")
library.register_fake("interpreted::scale_", lambda x, scale: x)


@library.register_kernel("interpreted::scale_", ("cpu", "foo"))
@library.tile_kernel
def scale_rows(x, scale, rows):
    for row in rows:
        target = x.row(row)
        for i in range(x.shape[-1]):
            target[i] *= scale[row]


library.define("interpreted::norms", "(Tensor x, float eps) -> (Tensor, Tensor)")


@library.register_fake("interpreted::norms")
def norms_fake(x, eps):
    return x.new_empty(x.shape[0]), x.new_empty(())


def mean(norms, mean):
    total = language.zero(norms)
    for i in range(norms.size):
        total = total + norms[i]
    mean.flat[0] = total / norms.size


@library.register_kernel("interpreted::norms", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, finish=mean)
def norms(x, eps, norms, mean, rows):
    """Normalise with explicit vectors; the remainder one by one."""
    size, step = x.shape[-1], language.lanes(x)
    for row in rows:
        data = x.row(row)
        totals = language.splat(language.zero(x), step)
        for i in range(0, size - step + 1, step):
            values = language.absolute(language.load_vector(language.shift(data, i), 0, step))
            totals = language.fma(values, values, totals)
        total = language.reduce_add(totals)
        for i in range(size // step * step, size):
            total += data[i] * data[i]
        norms[row] = language.cast(math.sqrt(total + eps), x)


library.define("interpreted::pick", "(Tensor x, Tensor index) -> Tensor")
library.register_fake("interpreted::pick", lambda x, index: x.new_empty(index.shape[0], 8))


def refuse_index(x, index):
    raise IndexError(f"pick: index must be in [0, {x.shape[0]}), got {index.tolist()}")


@library.register_kernel("interpreted::pick", ("cpu", "foo"))
@library.tile_kernel(contiguous_rows=True, tiles=lambda index: index.size, refuse=refuse_index)
def pick(x, index, output, places):
    """Write the places of large numbers among a row's first 8, and their count at the end."""
    for place in places:
        row = index[place]
        if not 0 <= row < x.shape[0]:
            return False
        half = language.splat(language.cast(0.5, x), 8)
        language.prefetch_vectors(x.row(row), 8, 8, 2)
        found = language.less(half, language.load_vector(x.row(row), 0, 8))
        language.store(output.row(place), 0, language.splat(language.zero(x), 8))
        count, lane = 0, language.next_lane(found, 0)
        while lane < 8:
            count += 1
            output[place, lane] = lane + 1
            lane = language.next_lane(found, lane + 1)
        output[place, -1] = output[place, -1] + 10 * count
    return True


def is_refused(x, index):
    try:
        torch.ops.interpreted.pick(x, index)
    except IndexError:
        return torch.tensor(True)
    return torch.tensor(False)


def calls(device, dtype):
    """Return all kernels' results on the cpu; each can be rounded in only one way."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.rand(5, 19, generator=generator, dtype=torch.float64) + 0.1 for _ in range(2))
    x, y = x.to(device, dtype), y.to(device, dtype)
    counts = torch.arange(19, device=device)
    blended = blend(x.T, y.T.contiguous(), weight=0.7)
    out = torch.empty(19, 5, device=device, dtype=torch.float64)
    blend(x.T, y[:1].T, out=out)
    results = [blended, out, *kept(x, x > 0.5, counts), *kept(x, x > 0.5, counts, bound=3)]
    scaled = torch.ops.interpreted.scale_(x.T.clone(), y[0])
    results += [scaled, *torch.ops.interpreted.norms(x, 1e-6)]
    results += [torch.ops.interpreted.blend_(x.clone(), torch.ones((), dtype=dtype))]
    results += [torch.ops.foo.abs(-x), torch.ops.foo.abs(x.to(torch.complex64)).float()]
    # An odd number above 256 lies halfway between two bfloat16 numbers.
    triples = torch.arange(1, 200, device=device).to(dtype).view(1, -1)
    results += [torch.ops.interpreted.scale_(triples, torch.full((1,), 3, device=device))]
    rows = torch.tensor([4, 0, 2, 1], device=device)
    results += [torch.ops.interpreted.pick(x, rows), is_refused(x, rows), is_refused(x, rows + 1)]
    return [result.cpu() for result in results]


def all_calls():
    return {(d, str(dtype)): calls(d, dtype) for d in ("cpu", "foo") for dtype in DTYPES}


if __name__ == "__main__":
    torch.save(all_calls(), sys.argv[1])
