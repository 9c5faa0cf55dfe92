"""Random numbers in kernels: those of Philox4x32-10, in every order, interpreted or not."""

import re

import numpy as np
import pytest
import torch

from foo_ops import language, library
from foo_ops.kernels.interpret import language as interpreted_language


def philox(counter, key):
    """Return a counter's random words; Salmon et al. 2011, section 3.3."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y % 2**32, (x >> 32) ^ d ^ m, x % 2**32
        k, m = (k + 0x9E3779B9) % 2**32, (m + 0xBB67AE85) % 2**32
    return a, b, c, d


def uniform(seed, offset):
    halves = [(number % 2**64 % 2**32, number % 2**64 >> 32) for number in (offset, seed)]
    return (philox((*halves[0], 0, 0), halves[1])[0] >> 8) / 2**24


@library.numba_op("foo_random::drawn")
def drawn(offset: int, like: float, seed: int = 0) -> float:
    return language.random(seed, offset) + 0.0 * like


def test_the_reference_has_the_known_answers():
    """The answers are from the tests that the paper's authors published with their library."""
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    digits = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    assert philox(*digits) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63)])
def test_numbers(seed, device):
    offsets = [0, 1, 2, 3, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), *range(100, 150)]
    expected = [uniform(seed, offset) for offset in offsets]
    for dtype in (torch.float32, torch.float64):
        x = torch.zeros(len(offsets), dtype=dtype, device=device)
        assert drawn(torch.tensor(offsets, device=device), x, seed=seed).tolist() == expected
    interpreted = [interpreted_language.random(np.int64(seed), np.int64(o)) for o in offsets]
    assert interpreted == expected
    assert interpreted[0].dtype == np.float32


def test_uniform_and_independent():
    """Means, variances and correlations are within the deviations of independent numbers."""
    count = 1 << 20
    x = drawn(torch.arange(count), torch.zeros(1, dtype=torch.float64), seed=3)
    y = drawn(torch.arange(count), torch.zeros(1, dtype=torch.float64), seed=4)
    assert 0 <= x.min() < 1e-4
    assert 1 - 1e-4 < x.max() < 1
    six_deviations = 6 / (12 * count) ** 0.5
    assert abs(x.mean() - 0.5) < six_deviations
    assert abs(x.var() - 1 / 12) < six_deviations
    for other in (y, x.roll(1), x.roll(4096)):
        assert abs(((x - 0.5) * (other - 0.5)).mean()) < six_deviations
    counts = torch.histc(x, 256, 0, 1)
    assert ((counts - count / 256).abs() < 6 * (count / 256) ** 0.5).all()


def test_every_number_of_threads_draws_the_same():
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(drawn(torch.arange(300_000), torch.zeros(1), seed=7))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


def test_wrong_arguments():
    @library.numba_op("foo_random::wrong")
    def wrong(x: float) -> float:
        return language.random(1, x)

    message = "random: offset must be an integer, got float32"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        wrong(torch.ones(3))
