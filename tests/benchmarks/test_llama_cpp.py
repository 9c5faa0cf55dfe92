"""llama.cpp computes the same as the model of transformers, where it is installed."""

import importlib.util

import pytest
import torch

import foo_ops
from benchmarks import models
from benchmarks.llama_cpp import LlamaCpp, named_tensors
from benchmarks.measure import Limits, difference, measure
from foo_ops.kernels.compiler.processor import has_matrix_unit

IS_INSTALLED = all(map(importlib.util.find_spec, ("llama_cpp", "gguf")))
TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)
SIZE = models.QUICK


@pytest.mark.skipif(not IS_INSTALLED, reason="needs llama-cpp-python and gguf")
@pytest.mark.parametrize("decodes", [False, True])
def test_logits(decodes):
    model, tokens = SIZE.model("float32"), SIZE.tokens(1, SIZE.prompt + 1)
    contender = LlamaCpp(model, tokens[0].tolist(), "float32", decodes)
    with torch.no_grad():
        expected = model(tokens if decodes else tokens[:, :-1], logits_to_keep=1).logits
    for _ in range(2):
        assert contender.time(2, 1) > 0
        assert difference([expected], contender.results()) < 1e-3


@pytest.mark.parametrize("phase", ["prefill", "decoding"])
def test_contenders(phase):
    """Missing packages are named; a contender with another result would be missing.

    llama.cpp crashes with AMX (`benchmarks.llama_cpp.Server`), and is measured with other weights.
    """
    case = next(it for it in models.cases(SIZE, 1) if f"{phase}, bfloat16" in it.name)
    (result,) = measure(case, TINY)
    names = {"llama.cpp", *(f"llama.cpp, {bits} bits" for bits in (8, 4) if phase == "decoding")}
    crashed = {it for it, text in result.failures.items() if text.endswith("Server has ended")}
    assert crashed == set() or has_matrix_unit()
    assert set(result.failures) == (crashed if IS_INSTALLED else names)
    assert names <= {*result.peers(), *result.failures}


def test_rotations_have_neighbours_for_pairs():
    """A query projection, written and rotated in neighbouring pairs, equals the model's own."""
    model = SIZE.model("float64")
    own = model.model.layers[0].self_attn.q_proj.weight
    written = dict(named_tensors(model))["blk.0.attn_q.weight"]
    heads, input = model.config.num_attention_heads, torch.randn(3, own.shape[1]).double()
    angles = torch.randn(3, 1, model.config.head_dim // 2).double()

    def turned(weight, interleaved):
        query = (input @ weight.T).unflatten(1, (heads, -1))
        table = angles.cos(), angles.sin()
        return foo_ops.rotary_embedding(query, *table, interleaved=interleaved)

    halves = turned(own, False).unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
    torch.testing.assert_close(turned(written, True), halves)
