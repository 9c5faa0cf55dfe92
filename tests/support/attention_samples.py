"""Samples of attention that several files of tests take."""

import pytest

from foo_ops.testing import ATTENTION, ATTENTION_VARLEN
from foo_ops.testing.specs.attention import attention_sample, random_bias, random_slopes
from foo_ops.testing.specs.attention_varlen import Pages, varlen_sample

ALL = {
    "heads": 2,
    "key_heads": 1,
    "slopes": random_slopes(2),
    "sinks": random_bias(2),
    "softcap": 2.0,
    "window_right": 0,
}
ONCE = {
    "attention": (ATTENTION, attention_sample(**ALL, bias=random_bias(2, 1, 9, 11))),
    "packed": (ATTENTION_VARLEN, varlen_sample([(2, 3), (1, 2)], **ALL)),
    "blocks": (ATTENTION_VARLEN, varlen_sample([(2, 3), (1, 2)], **ALL, pages=Pages(2))),
}
for_each_once = pytest.mark.parametrize(("spec", "make"), ONCE.values(), ids=ONCE.keys())


def finite(outputs):
    return tuple(output.where(output.isfinite(), 0) for output in outputs)
