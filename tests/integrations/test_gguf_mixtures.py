"""Mixtures of GGUF files are loaded with their experts in the bits that they have."""

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
    MIXTURES,
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
from support.memory_of_loading import QWEN3_MOE, check_peak
from torch import nn
from transformers import AutoModelForCausalLM, GgufConfig

import foo_ops
from foo_ops.integrations.transformers import apply, left_alone, replaced
from foo_ops.integrations.transformers.gguf import Place, put_experts
from foo_ops.integrations.transformers.gguf_blocks import joined_integers
from foo_ops.integrations.transformers.mxfp4 import FooMxfp4Experts
from foo_ops.integrations.transformers.packed_experts import FooPackedExperts
from foo_ops.ops.linear_mxfp4 import dequantize_mxfp4

EXPERTS, ROWS, COLUMNS = 3, 70, 256


def experts_of(model, layer=0):
    return model.model.layers[layer].mlp.experts


def assert_mostly_near(model, exact, dtype, roundings=32):
    """Compare logits of tokens, few of which may have other experts by rounding."""
    exact_logits = logits_of(exact)
    errors = (logits_of(model).cpu().double() - exact_logits).abs().amax(-1).flatten()
    room = roundings * torch.finfo(dtype).eps * exact_logits.abs().max()
    assert (errors <= room).double().mean() >= 0.8


def types_of(model):
    return [type(it.mlp.experts) for it in model.model.layers]


# ------------------------------------------------------------------------------------------- blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kinds", "bits", "is_exact"),
    [
        (("Q4_0",), 4, True),
        (("Q4_K", "Q4_K"), 4, True),
        (("Q4_K", "Q4_0"), 4, True),
        (("Q4_0", "Q4_1"), 4, True),
        (("Q8_0", "Q5_0"), 8, True),
        (("IQ4_XS", "MXFP4"), 8, True),
        (("Q4_K", "Q6_K"), 8, False),
        (("Q8_0", "Q4_0"), 8, False),
    ],
)
def test_rows_of_parts_are_joined(kinds, bits, is_exact, dtype):
    """Parts with 4 bits are rounded to 8 only beside others with 8."""
    random = np.random.default_rng(1)
    made = [random_matrix(kind, EXPERTS * ROWS, COLUMNS, random) for kind in kinds]
    parts = [torch.from_numpy(data).unflatten(0, (EXPERTS, ROWS)) for data, _ in made]
    exact = torch.cat([numbers().unflatten(0, (EXPERTS, ROWS)) for _, numbers in made], 1)
    found = joined_integers(parts, kinds, dtype)
    assert found.scale.shape == (EXPERTS, len(kinds) * ROWS, COLUMNS // 32)
    assert (found.zero is not None) == (bits == 4)
    rows = [it.flatten(0, 1) for it in found if it is not None]
    wide = [it.double() if it.is_floating_point() else it for it in rows]
    errors = (foo_ops.dequantize_weight(*wide) - exact.flatten(0, 1)).abs()
    # A minimum is the zero times the scale, both rounded.
    largest = exact.flatten(0, 1).abs().unflatten(1, (-1, 32)).amax(-1)
    room = (4 * torch.finfo(dtype).eps + (0 if is_exact else 1 / 254)) * largest + 1e-30
    assert bool((errors.unflatten(1, (-1, 32)).amax(-1) <= room).all())


def test_blocks_are_released_by_rows():
    random = np.random.default_rng(1)
    parts = [
        torch.from_numpy(random_matrix("Q4_K", 2 * ROWS, COLUMNS, random)[0]).unflatten(0, (2, -1))
        for _ in range(2)
    ]
    released = []
    joined_integers(parts, ["Q4_K"] * 2, torch.float32, released.append)
    assert [it.data_ptr() for it in released] == [
        rows.data_ptr() for blocks in parts for rows in blocks
    ]
    assert sum(it.nbytes for it in released) == sum(it.nbytes for it in parts)


# ------------------------------------------------------------------------------------------- models


@pytest.fixture(scope="module", params=["Q4_0", "Q4_K", *whole("Q8_0")])
def mixture(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("mixture") / f"{request.param}.gguf"
    return path, write_gguf(path, request.param, "qwen3moe")


@pytest.mark.parametrize("is_applied", [False, True])
def test_logits(mixture, is_applied):
    path, exact = mixture
    model = load(path)
    assert types_of(model) == [FooPackedExperts] * 2
    if is_applied:
        apply(model)
        assert not left_alone(model)
    assert replaced(model)["quantize"] == 11
    # Few rows, and many.
    for count in (1, 60):
        assert_near(logits_of(model, count), logits_of(exact, count), roundings=64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_floats_on_foo(mixture, dtype):
    path, exact = mixture
    model = apply(load(path, device_map="foo", dtype=dtype))
    buffers = dict(experts_of(model).named_buffers())
    assert {it.device.type for it in buffers.values()} == {"foo"}
    assert buffers["down_proj_scale"].dtype == dtype
    assert_mostly_near(model, exact, dtype)


@pytest.mark.parametrize("kind", ["Q4_K", *whole("Q6_K")])
@pytest.mark.parametrize("architecture", [it for it in MIXTURES if it != "qwen3moe"])
def test_architectures(architecture, kind, tmp_path):
    """Qwen2's mixtures have a shared expert; MiniMax's have a bias for choices."""
    exact = write_gguf(tmp_path / "model.gguf", kind, architecture)
    model = load(tmp_path / "model.gguf")
    assert types_of(model) == [FooPackedExperts] * 2
    if kind == "Q4_K":
        assert_near(logits_of(model), logits_of(exact), roundings=64)
    else:
        assert_mostly_near(model, exact, torch.bfloat16, roundings=8)


@pytest.mark.parametrize("kinds", [{"Q4_K": 4, "Q6_K": 8}, {"Q5_K": 8, "Q8_0": 8}])
def test_kinds_are_mixed(kinds, tmp_path):
    """In Q4_K_M, half of the second weights have 6 bits."""
    (first, bits), (second, other_bits) = kinds.items()
    of_file = {"ffn_down_exps": second}
    exact = write_gguf(tmp_path / "model.gguf", first, "qwen3moe", kinds=of_file)
    model = load(tmp_path / "model.gguf")
    zeros = [experts_of(model)._buffers[f"{it}_zero"] for it in ("gate_up_proj", "down_proj")]
    assert [8 if it is None else 4 for it in zeros] == [bits, other_bits]
    assert_mostly_near(model, exact, torch.bfloat16, roundings=8)


def test_gates_of_another_kind(tmp_path):
    kinds = {"ffn_gate_exps": "Q4_0"}
    exact = write_gguf(tmp_path / "model.gguf", "Q4_K", "qwen3moe", kinds=kinds)
    model = load(tmp_path / "model.gguf")
    zero = experts_of(model).gate_up_proj_zero
    assert bool((zero[:, :256] == 8).all())
    assert not bool((zero[:, 256:] == 8).all())
    assert_near(logits_of(model), logits_of(exact), roundings=64)


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_mxfp4(device, tmp_path):
    """All other matrices of such files have 8 bits."""
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "MXFP4")
    exact = write_gguf(tmp_path / "model.gguf", "Q8_0", "qwen3moe", kinds=kinds)
    model = load(tmp_path / "model.gguf", device_map=device)
    assert types_of(model) == [FooMxfp4Experts] * 2
    weight = dequantize_mxfp4(
        experts_of(model).gate_up_proj_blocks.flatten(-2),
        experts_of(model).gate_up_proj_scales,
        torch.float64,
    )
    assert torch.equal(weight.cpu(), experts_of(exact).gate_up_proj)
    for count in (1, 60):
        assert_near(logits_of(model, count), logits_of(exact, count), roundings=64)


def test_mxfp4_beside_another_kind(tmp_path):
    exact = write_gguf(
        tmp_path / "model.gguf", "MXFP4", "qwen3moe", kinds={"ffn_down_exps": "IQ4_NL"}
    )
    model = load(tmp_path / "model.gguf")
    assert types_of(model) == [FooPackedExperts] * 2
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_one_row_of_zeros_serves_all_experts(tmp_path):
    write_gguf(tmp_path / "model.gguf", "Q4_0", "qwen3moe", is_returned=False)
    experts = experts_of(load(tmp_path / "model.gguf"))
    assert experts.gate_up_proj_zero.stride()[:2] == (0, 0)
    assert experts.gate_up_proj_zero.shape == experts.gate_up_proj_scale.shape


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_experts_of_numbers_stay_numbers(kind, tmp_path):
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), kind)
    exact = write_gguf(tmp_path / "model.gguf", "Q4_0", "qwen3moe", kinds=kinds)
    model = load(tmp_path / "model.gguf", dtype=torch.bfloat16)
    assert replaced(model)["quantize"] == 9
    for name, weight in experts_of(model).named_parameters():
        assert torch.equal(weight, experts_of(exact).get_parameter(name).to(torch.bfloat16))


def test_experts_that_are_quantised_in_part_become_numbers(tmp_path):
    kinds = {"ffn_down_exps": "F16"}
    exact = write_gguf(tmp_path / "model.gguf", "Q4_K", "qwen3moe", kinds=kinds)
    model = load(tmp_path / "model.gguf")
    assert isinstance(experts_of(model).gate_up_proj, nn.Parameter)
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_generate(mixture):
    """A decode program computes the tokens after the third."""
    path, exact = mixture
    model = apply(load(path))
    assert replaced(model)["decode"] == 1
    check_generation(model, exact, 8)


def test_gradients_flow_to_inputs_and_norms(mixture):
    path, exact = mixture
    check_gradients_of_inputs_and_norms(load(path), exact)


def test_is_not_written_in_other_formats(mixture, tmp_path):
    check_is_not_written(load(mixture[0]), tmp_path)


def test_dequantize_is_transformers_own(mixture):
    path, exact = mixture
    model = load(path, quantization_config=GgufConfig(dequantize=True))
    assert isinstance(experts_of(model).gate_up_proj, nn.Parameter)
    assert_near(logits_of(model), logits_of(exact), roundings=64)


def test_a_kind_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(BLOCKS, "I8", UNREADABLE)
    kinds = {"ffn_up_exps": "I8"}
    write_gguf(tmp_path / "model.gguf", "Q4_0", "qwen3moe", kinds=kinds, is_returned=False)
    message = "gguf: blk.0.ffn_up_exps.weight is I8, which cannot be read"
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}$"):
        load(tmp_path / "model.gguf")


@pytest.mark.parametrize("device", ["cpu", "foo"])
def test_architectures_that_transformers_keeps_in_blocks(device, tmp_path):
    path = tmp_path / "model.gguf"
    write_qwen35(path, "Q4_0", is_mixture=True)
    model = load(path, device_map=device)
    assert types_of(model) == [FooPackedExperts] * 2
    exact = load(path, quantization_config=GgufConfig(dequantize=True))
    exact.set_experts_implementation("eager")
    assert_near(logits_of(model), logits_of(exact.double()), roundings=64)


def test_gates_of_another_kind_that_transformers_refuses(tmp_path):
    kinds = {"ffn_up_exps": "IQ4_NL", "ffn_gate_exps": "Q8_0"}
    numbers = write_qwen35(tmp_path / "model.gguf", "Q4_0", kinds, is_mixture=True)
    experts = experts_of(load(tmp_path / "model.gguf"), 1)
    gate, up = (numbers[f"blk.1.ffn_{it}_exps.weight"] for it in ("gate", "up"))
    rows = (experts.gate_up_proj.flatten(0, 1), experts.gate_up_proj_scale.flatten(0, 1).double())
    assert torch.equal(foo_ops.dequantize_weight(*rows), torch.cat((gate, up), 1).flatten(0, 1))


def test_experts_of_numbers_in_such_architectures(tmp_path):
    kinds = dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "F16")
    numbers = write_qwen35(tmp_path / "model.gguf", "Q4_0", kinds, is_mixture=True)
    weight = experts_of(load(tmp_path / "model.gguf")).down_proj
    assert torch.equal(weight.double(), numbers["blk.0.ffn_down_exps.weight"])


def test_other_modules_stay():
    config, sizes = MIXTURES["qwen3moe"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(**sizes, num_hidden_layers=1))
    path = "model.layers.0.mlp.experts"
    up, gate, down = (
        Place(f"{path}.gate_up_proj", 1, 2),
        Place(f"{path}.gate_up_proj", 0, 2),
        Place(f"{path}.down_proj", 0, 1),
    )
    found = {"up": (up, "Q4_K"), "down": (down, "Q8_0")}
    assert put_experts(model, found) == {}
    model.model.layers[0].mlp.experts.has_bias = True
    assert put_experts(model, {**found, "gate": (gate, "Q4_0")}) == {}
    model.model.layers[0].mlp.experts.has_bias = False
    assert put_experts(model, {"mtp": (Place("mtp.experts.down_proj", 0, 1), "Q8_0")}) == {}
    assert put_experts(model, {**found, "gate": (gate, "Q4_0")}) == {
        "up": f"{path}.gate_up_proj_1",
        "gate": f"{path}.gate_up_proj_0",
        "down": f"{path}.down_proj_0",
    }
    kinds = {"gate_up_proj": ["Q4_0", "Q4_K"], "down_proj": ["Q8_0"]}
    assert model.get_submodule(path).kinds == kinds


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("kind", "most"), [("Q4_0", 1.25), ("Q4_K", 1.25), ("Q6_K", 1.45)])
def test_memory_of_loading(kind, most, tmp_path):
    """As for layers: see test_gguf_files."""
    path = tmp_path / "model.gguf"
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 768, "num_hidden_layers": 6}
    sizes |= {"num_attention_heads": 16, "vocab_size": 2048, "num_experts": 32}
    write_gguf(path, kind, "qwen3moe", is_returned=False, **sizes)
    size = path.stat().st_size
    assert 200e6 < size < 450e6
    check_peak(
        tmp_path, size, most,
        small=QWEN3_MOE,
        imports=("accelerate", "gguf"), gguf_file=path.name, dtype="bfloat16",
    )  # fmt: skip
