"""GGUF files are loaded with their matrices in the bits that they have, and compute the same."""

import re
import sys

import numpy as np
import pytest
import torch
from support.exact import assert_near
from support.parts import whole

pytest.importorskip("transformers")
pytest.importorskip("gguf")
from support.gguf_files import (
    BLOCKS,
    SIZES,
    UNREADABLE,
    random_matrix,
    write_gguf,
    write_qwen35,
)
from support.gguf_models import (
    check_generation,
    check_gradients_of_inputs_and_norms,
    check_is_not_written,
    load,
    logits_of,
)
from support.memory_of_loading import check_peak
from torch import nn
from transformers import GgufConfig, LlamaConfig, LlamaForCausalLM

import foo_ops
from foo_ops.integrations.transformers import apply, left_alone, replaced
from foo_ops.integrations.transformers.gguf import Stored, put
from foo_ops.integrations.transformers.gguf_blocks import EXACT, TABLES, codes_of, integers_of
from foo_ops.integrations.transformers.packed import FooPackedEmbedding, FooPackedLinear

ROUNDED = sorted(BLOCKS.keys() - EXACT.keys())
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------------------------- blocks


def numbers_of(integers):
    """Return the weights that integers stand for, in float64."""
    wide = [it.double() if it.is_floating_point() else it for it in integers if it is not None]
    return foo_ops.dequantize_weight(*wide)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", EXACT)
def test_integers_stay_as_they_are(kind, dtype):
    """Only scales and minima are rounded, to the dtype."""
    data, numbers = random_matrix(kind, 300, 256, np.random.default_rng(1))
    exact = numbers()
    integers = integers_of(torch.from_numpy(data.copy()), kind, dtype)
    assert integers.scale.dtype == dtype
    # A minimum is the zero times the scale, both rounded.
    info, largest = torch.finfo(dtype), exact.abs().unflatten(1, (-1, 32)).amax(-1)
    room = 4 * info.eps * largest + 16 * info.tiny * info.eps
    errors = (numbers_of(integers) - exact).abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((errors <= room).all())


@pytest.mark.parametrize("device", ["cpu", "foo"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TABLES)
def test_codes_and_their_scales_stay_as_they_are(kind, dtype, device):
    data, numbers = random_matrix(kind, 300, 512, np.random.default_rng(1))
    found = codes_of(torch.from_numpy(data.copy()).to(device), kind, dtype)
    assert found.scale.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    codes = torch.stack((found.weight.cpu() & 15, found.weight.cpu() >> 4), -1).flatten(1)
    scales = found.scale.cpu().double().repeat_interleave(32, 1)
    assert torch.equal(found.table.cpu().double()[codes.long()] * scales, numbers())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ROUNDED)
def test_others_are_the_nearest_of_8_bits(kind, dtype):
    data, numbers = random_matrix(kind, 300, 256, np.random.default_rng(1))
    exact = numbers()
    integers = integers_of(torch.from_numpy(data.copy()), kind, dtype)
    groups = exact.unflatten(1, (-1, 32))
    errors = (numbers_of(integers) - exact).abs().unflatten(1, (-1, 32))
    info = torch.finfo(dtype)
    room = groups.abs().amax(-1) / 254 * (1 + 2 * info.eps) + info.tiny * info.eps
    # transformers and gguf compute the numbers in float32.
    room = room + 2 * torch.finfo(torch.float32).eps * groups.abs().amax(-1)
    assert bool((errors <= room.unsqueeze(-1)).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 2.0**-20])
@pytest.mark.parametrize("minimum", [0.0, -(2.0**-24), 0.5, -600.0])
def test_groups_of_equal_weights(minimum, scale, dtype):
    """Scales of zero, and scales too small for the dtype beside their minimum."""
    numbers = np.array([scale, minimum], np.float16)
    block = np.frombuffer(numbers.tobytes() + bytes([0x5A] * 16), np.uint8)
    integers = integers_of(torch.from_numpy(block.copy())[None], "Q4_1", dtype)
    exact = torch.tensor([scale * it + minimum for it in (10, 5)], dtype=torch.float64)
    exact = exact.repeat_interleave(16)[None]
    info = torch.finfo(dtype)
    found = numbers_of(integers)
    assert bool(((found - exact).abs() <= 4 * info.eps * exact.abs() + 2.0**-20).all())
    assert bool(found.isfinite().all())


# ------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module", params=["Q4_0", "Q4_K", "Q8_0", "IQ4_XS"])
def llama(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama") / f"{request.param}.gguf"
    return path, write_gguf(path, request.param)


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits(llama, is_applied):
    path, exact = llama
    model = load(path)
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 15
    assert isinstance(model.model.embed_tokens, FooPackedEmbedding)
    # Few rows, and many.
    for count in (1, 30):
        assert_near(logits_of(model, count), logits_of(exact, count), roundings=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_on_foo(llama, dtype):
    path, exact = llama
    model = apply(load(path, device_map="foo", dtype=dtype))
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "foo"
    assert model.dtype == dtype
    assert_near(logits_of(model), logits_of(exact), roundings=64)


@pytest.mark.parametrize("kind", ["IQ4_NL", "MXFP4"])
def test_tables_that_layers_have_and_embeddings_have_not(kind, tmp_path):
    exact = write_gguf(tmp_path / "model.gguf", kind, tie_word_embeddings=True)
    model = apply(load(tmp_path / "model.gguf"))
    layer = model.model.layers[0].mlp.down_proj
    assert layer.table.dtype == torch.float32
    assert layer.bits == 4
    assert model.lm_head.bits == 8
    for count in (1, 30):
        assert_near(logits_of(model, count), logits_of(exact, count), roundings=64)


@pytest.mark.parametrize("kind", ["Q4_0", *whole("Q6_K")])
@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_architectures(architecture, kind, tmp_path):
    """Qwen2 has biases, Qwen3 norms of heads."""
    exact = write_gguf(tmp_path / "model.gguf", kind, architecture)
    model = load(tmp_path / "model.gguf")
    assert replaced(model)["quantize"] == 15
    room = {} if kind == "Q4_0" else {"dtype": torch.bfloat16}
    assert_near(logits_of(model), logits_of(exact), roundings=64 if kind == "Q4_0" else 8, **room)


def test_one_row_of_zeros_serves_layers_with_the_same_input(tmp_path):
    exact = write_gguf(tmp_path / "model.gguf", "Q4_0")
    model = apply(load(tmp_path / "model.gguf"))
    mlp = model.model.layers[0].mlp
    zeros = [mlp.gate_proj.zero, mlp.up_proj.zero]
    assert [it.stride(0) for it in zeros] == [0, 0]
    assert zeros[0].data_ptr() == zeros[1].data_ptr()
    assert_near(logits_of(model, 1), logits_of(exact, 1), roundings=64)


def test_tied_head(tmp_path):
    exact = write_gguf(tmp_path / "model.gguf", "Q4_K", tie_word_embeddings=True)
    model = load(tmp_path / "model.gguf")
    head, embedding = model.lm_head, model.model.embed_tokens
    assert [type(it) for it in (head, embedding)] == [FooPackedLinear, FooPackedEmbedding]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(head.buffers(), embedding.buffers()))
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_kinds_are_mixed(tmp_path):
    """As in Q4_K_M; matrices of numbers stay numbers."""
    kinds = {
        "embed_tokens": "F16",
        "lm_head": "Q8_0",
        "v_proj": "BF16",
        "o_proj": "F32",
        "k_proj": "Q5_0",
    }
    exact = write_gguf(tmp_path / "model.gguf", "Q4_K", kinds=kinds)
    model = load(tmp_path / "model.gguf")
    attention = model.model.layers[0].self_attn
    found = [type(it) for it in (model.model.embed_tokens, attention.v_proj, attention.o_proj)]
    assert found == [nn.Embedding, nn.Linear, nn.Linear]
    assert replaced(model)["quantize"] == 11
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_generate(llama):
    path, exact = llama
    check_generation(apply(load(path)), exact, 6)


def test_gradients_flow_to_inputs_and_norms(llama):
    path, exact = llama
    check_gradients_of_inputs_and_norms(load(path), exact)


def test_is_not_written_in_other_formats(llama, tmp_path):
    check_is_not_written(load(llama[0]), tmp_path)


def test_dequantize_is_transformers_own(llama):
    path, exact = llama
    model = load(path, quantization_config=GgufConfig(dequantize=True))
    assert type(model.lm_head) is nn.Linear
    assert_near(logits_of(model), logits_of(exact), roundings=64)


@pytest.mark.parametrize("kind", ["Q6_K", *whole("Q4_0")])
@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_architectures_that_transformers_keeps_in_blocks(device, kind, tmp_path):
    """Its own conversions reorder value heads, and one layer's inputs."""
    path = tmp_path / "model.gguf"
    write_qwen35(path, kind)
    model = load(path, device_map=device)
    exact = load(path, quantization_config=GgufConfig(dequantize=True)).double()
    assert replaced(model)["quantize"] == 14
    assert model.model.layers[0].linear_attn.out_proj.order is not None
    room = {} if kind == "Q4_0" else {"dtype": torch.bfloat16}
    assert_near(logits_of(model), logits_of(exact), roundings=64 if kind == "Q4_0" else 8, **room)


def test_modules_of_other_classes_stay():
    """A scaled embedding, as Gemma's, computes something else, and so does what is tied to it."""
    config = LlamaConfig(**SIZES, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)

    class ScaledEmbedding(nn.Embedding):
        pass

    name = "model.embed_tokens.weight"
    assert not put(model, name, Stored("Q8_0"), (97, 256))
    model.model.embed_tokens.__class__ = ScaledEmbedding
    assert not put(model, name, Stored("Q8_0"), (96, 256))
    assert type(model.lm_head) is nn.Linear


def test_a_kind_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "I8", UNREADABLE)
    write_gguf(tmp_path / "model.gguf", "Q4_0", kinds={"0.mlp.up_proj": "I8"})
    message = "gguf: blk.0.ffn_up.weight is I8, which cannot be read"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        load(tmp_path / "model.gguf")


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "most"), [("Q4_0", 1.25), ("Q4_K", 1.25), ("IQ4_XS", 1.4), ("Q6_K", 1.45)]
)
def test_memory_of_loading(kind, most, tmp_path):
    """Neither the file nor temporary tensors stay in memory beside the layers.

    Scales and minima of Q4_K have 6 bits in the file: foo's layout takes 1.11 of its size. Weights
    of Q6_K become 8 bits, which take 1.3, and scales of IQ4_XS float32, which takes 1.18.
    """
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 9}
    sizes |= {"num_attention_heads": 16, "vocab_size": 2048}
    write_gguf(path, kind, is_returned=False, **sizes)
    size = path.stat().st_size
    assert 200e6 < size < 450e6
    check_peak(
        tmp_path, size, most,
        imports=("accelerate", "gguf"), gguf_file=path.name, dtype="bfloat16",
    )  # fmt: skip
