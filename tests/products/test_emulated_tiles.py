"""Attention and linear layers on the registers of a matrix unit, which are emulated.

In a process of its own, whose kernels are compiled for these registers.
"""

import pytest
from support.processes import python

EMULATED = """
from support.emulated_tiles import emulate
emulate()
"""

OPERATORS = (
    EMULATED
    + """
import dataclasses, sys
import torch
from foo_ops import testing
from foo_ops.testing.specs.attention import attention_sample, random_bias

# The registers are those of one thread.
torch.set_num_threads(1)

def sizes(**options):
    return attention_sample(**{"batch": 1, "heads": 1, **options})

SAMPLES = {
    # Panels of 64 queries and one of 32, and tiles of 128 keys of which the last is odd.
    "panels": sizes(queries=300, keys=301),
    "causal": sizes(queries=300, keys=301, is_causal=True),
    # A block of eight panels: three are in different steps at a time.
    "many panels": sizes(queries=512, keys=200),
    "many causal panels": sizes(queries=512, keys=512, is_causal=True),
    # Some panels see no key of a tile.
    "window": sizes(queries=400, keys=400, window_left=20, window_right=30),
    "right window": sizes(queries=129, keys=417, window_right=0),
    "grouped heads": sizes(heads=6, key_heads=2, queries=40, keys=150),
    "one panel": sizes(queries=33, keys=127, head_dim=64),
    "sinks": sizes(heads=2, queries=130, keys=90, sinks=random_bias(2)),
    **{
        f"head_dim {size}": sizes(queries=140, keys=131, head_dim=size, value_dim=value_size)
        for size, value_size in ((1, 40), (8, 8), (17, 1), (32, 32), (64, 64), (72, 24), (96, 160),
                                 (128, 128), (256, 256))
    },
}
for spec in testing.OPERATORS:
    if spec.name not in sys.argv[1:]:
        continue
    spec = dataclasses.replace(spec, dtypes=(torch.bfloat16,), devices=("cpu",))
    if spec.name == "foo::attention":
        spec = dataclasses.replace(
            spec, samples={**spec.samples, **SAMPLES}
        )
    testing.check_operator(spec, checks=("values", "gradients"))
    print(spec.name)
"""
)

PRODUCTS = (
    EMULATED
    + """
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", sys.argv[1]]))
"""
)


@pytest.mark.whole
@pytest.mark.parametrize("operator", ["attention", "attention_varlen", "linear"])
def test_operators(tmp_path, operator):
    process = python(OPERATORS, f"foo::{operator}", FOO_CACHE_DIR=str(tmp_path))
    assert (process.stdout, process.stderr) == (f"foo::{operator}\n", "")


def test_products(tmp_path):
    path = "tests/products/test_on_amx.py"
    process = python(PRODUCTS, path, FOO_CACHE_DIR=str(tmp_path))
    assert process.returncode == 0, process.stdout
