"""Refused functions: the message gives the function, its line, the requirement, the value."""

import re

import pytest
import torch
from support.versions import TORCH

from foo_ops.ops.flex_attention.trace import trace

TABLE = torch.ones(4, 8)
WRITES_ITEMS = "torch.fill_" if TORCH >= (2, 15) else "torch.Tensor.copy_"
SINGLE = "must be made of operations on single numbers"


def branch(score, b, h, q, k):
    return score if score > 0 else -score


def number(score, b, h, q, k):
    return score * float(h)


def in_place(score, b, h, q, k):
    return score.add_(1)


def item_write(score, b, h, q, k):
    score[...] = 1
    return score


def captured_write(score, b, h, q, k):
    TABLE.mul_(1)
    return score


def random(score, b, h, q, k):
    return score + torch.rand(())


def dropout(score, b, h, q, k):
    return torch.nn.functional.dropout(score)


def whole_table(score, b, h, q, k):
    return score + TABLE[h]


def sort(score, b, h, q, k):
    return score.sort()[0]


def arc(score, b, h, q, k):
    return torch.atan(score)


def power(score, b, h, q, k):
    return score + q**k


def new_dimension(score, b, h, q, k):
    return score + TABLE[h, None, q]


def flag(score, b, h, q, k):
    return score + TABLE[q > k]


def too_many(score, b, h, q, k):
    return score + TABLE[h, q, k]


def three_numbers(score, b, h, q, k):
    return torch.ones(3)


def no_tensor(score, b, h, q, k):
    return 1.0


def complex_table(score, b, h, q, k):
    return score + COMPLEX[h].real


COMPLEX = torch.ones(4, dtype=torch.complex64)


@pytest.mark.parametrize(
    ("function", "error", "line", "message"),
    [
        (
            branch,
            NotImplementedError,
            1,
            "must not branch in Python on a value (use torch.where), "
            "got bool, int, float or item of a tensor",
        ),
        (
            number,
            NotImplementedError,
            1,
            "must not branch in Python on a value (use torch.where), "
            "got bool, int, float or item of a tensor",
        ),
        (in_place, NotImplementedError, 1, "must not write in place, got torch.Tensor.add_"),
        (item_write, NotImplementedError, 1, f"must not write in place, got {WRITES_ITEMS}"),
        (captured_write, NotImplementedError, 1, "must not write in place, got torch.Tensor.mul_"),
        (random, NotImplementedError, 1, "must not draw random numbers, got torch.rand"),
        (
            dropout,
            NotImplementedError,
            1,
            "must not draw random numbers, got torch.Tensor.bernoulli_",
        ),
        (whole_table, NotImplementedError, 1, f"{SINGLE}, got torch.add of shapes [], [8]"),
        (sort, NotImplementedError, 1, f"{SINGLE}, got torch.sort"),
        (arc, NotImplementedError, 1, f"{SINGLE}, got torch.atan"),
        (power, NotImplementedError, 1, f"{SINGLE}, got torch.pow of integers"),
        (new_dimension, NotImplementedError, 1, f"{SINGLE}, got an index that is NoneType"),
        (flag, NotImplementedError, 1, f"{SINGLE}, got an index of bool and shape []"),
        (too_many, NotImplementedError, 1, f"{SINGLE}, got 3 indices for 2 dimensions"),
        (three_numbers, ValueError, 0, "must return one number, got shape [3]"),
        (no_tensor, TypeError, 0, "must return a tensor, got float"),
        (
            complex_table,
            TypeError,
            1,
            "must capture tensors of bools, integers or floating-point numbers, got complex64",
        ),
    ],
)
def test_score_mod(function, error, line, message):
    code = function.__code__
    place = f"{code.co_filename}:{code.co_firstlineno + line}"
    expected = f"flex_attention: score_mod '{function.__name__}' ({place}) {message}"
    with pytest.raises(error, match=f"^{re.escape(expected)}$"):
        trace(function, None, torch.empty(0))


def test_parameters():
    place = f"{branch.__code__.co_filename}:{branch.__code__.co_firstlineno}"
    expected = (
        f"flex_attention: mask_mod 'branch' ({place}) must take 4 arguments "
        "(batch, head, query, key), got (score, b, h, q, k)"
    )
    with pytest.raises(TypeError, match=f"^{re.escape(expected)}$"):
        trace(None, branch, torch.empty(0))
    with pytest.raises(TypeError, match=r"must take 5 arguments .*, got \(b, h, q, k\)$"):
        trace(lambda b, h, q, k: q, None, torch.empty(0))


def test_line_within_another_function():
    def helper(score):
        return score.sort()[0]

    def outer(score, b, h, q, k):
        return helper(score)

    with pytest.raises(NotImplementedError, match=rf":{helper.__code__.co_firstlineno + 1}\)"):
        trace(outer, None, torch.empty(0))


def test_nothing_is_written():
    with pytest.raises(NotImplementedError):
        trace(captured_write, None, torch.empty(0))
    assert TABLE._version == 0


def test_errors_of_the_function_are_its_own():
    with pytest.raises(KeyError, match="mine"):
        trace(lambda score, b, h, q, k: {}["mine"], None, torch.empty(0))
