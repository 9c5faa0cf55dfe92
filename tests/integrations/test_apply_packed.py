"""`apply(model, quantize=4, keep_weights=False)` frees weights; `save_quantized` writes models."""

import copy
import json
import pickle
import re
import sys
import weakref

import pytest
import torch
from safetensors.torch import load_file
from support.exact import Doubles, assert_near, exact_copy
from support.processes import python
from support.quantized_files import gptq, write_checkpoint
from support.transformer_models import decoder, rounded, run, tokens
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)
from transformers.pytorch_utils import Conv1D

from foo_ops import dequantize_weight, quantize_weight
from foo_ops.integrations.transformers import (
    apply,
    left_alone,
    packed,
    quantized,
    replaced,
    restore,
    save_quantized,
)
from foo_ops.integrations.transformers.packed import FooPackedLinear
from foo_ops.integrations.transformers.packed_experts import FooPackedExperts

LLAMA = "llama"


def wide(name=LLAMA, device="cpu", dtype=torch.float32, **sizes):
    return decoder(name, device, dtype, hidden_size=64, num_attention_heads=8, **sizes)


def exactly(message):
    return f"^{re.escape(message)}$"


def bytes_of(model):
    """Count the memory of parameters and buffers."""
    storages = {}
    for tensor in (*model.parameters(), *model.buffers()):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def with_rounded_weights(model, bits):
    twin = exact_copy(model)
    for module in twin.modules():
        if type(module) in (nn.Linear, Conv1D):
            module.weight = rounded(module.weight, bits, type(module) is Conv1D)
    return twin


@pytest.mark.parametrize("bits", [8, 4])
def test_logits_are_those_of_the_rounded_weights(bits, device):
    model, inputs = wide(device=device), tokens(2, 12)
    twin = with_rounded_weights(model, bits)
    with Doubles():
        exact = run(twin, "eager", inputs)
    apply(model, quantize=bits, keep_weights=False)
    assert replaced(model)["quantize"] == 15
    assert "linear" not in replaced(model)
    assert not left_alone(model)
    assert_near(run(model, None, inputs), exact, roundings=128)


@pytest.mark.parametrize(("bits", "share"), [(4, 0.3), (8, 0.52)])
def test_weights_are_freed(bits, share):
    model = wide(dtype=torch.bfloat16)
    layers = [it for it in model.modules() if type(it) is nn.Linear]
    weights = [weakref.ref(it.weight) for it in layers]
    others = bytes_of(model) - sum(2 * it.weight.numel() for it in layers)
    apply(model, quantize=bits, keep_weights=False)
    assert all(isinstance(it, FooPackedLinear) for it in layers)
    assert not any(it() is not None for it in weights)
    # 4 bits have a scale and a zero for 64 or 32 of them.
    dense = sum(2 * it.in_features * it.out_features for it in layers)
    assert bytes_of(model) - others <= share * dense


def test_method(tmp_path):
    """Scales and zeros of "hqq" are used, and no format of compressed-tensors has them."""
    model, inputs = wide(), tokens(1, 7)
    twin = exact_copy(model)
    for module in twin.modules():
        if type(module) is nn.Linear:
            group_size = 64 if module.in_features % 64 == 0 else 32
            weight = module.weight.float()
            integers, *others = quantize_weight(weight, 4, group_size, method="hqq")
            rounded = dequantize_weight(integers, *(it.double() for it in others))
            module.weight = nn.Parameter(rounded)
    with Doubles():
        exact = run(twin, "eager", inputs)
    apply(model, quantize=4, keep_weights=False, method="hqq")
    assert_near(run(model, None, inputs), exact, roundings=128)
    message = "self_attn.q_proj: its zeros must be integers, and those of method='hqq' are not"
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        save_quantized(model, tmp_path)


def test_method_needs_weights_that_are_freed():
    message = "apply: method='hqq' needs keep_weights=False, got True"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        apply(wide(), quantize=4, method="hqq")


def test_after_an_earlier_apply():
    model, inputs = wide(), tokens(1, 7)
    apply(model, quantize=8)
    apply(model, quantize=4, keep_weights=False)
    twin = apply(wide(), quantize=4, keep_weights=False)
    assert replaced(model) == replaced(twin)
    assert torch.equal(run(model, None, inputs), run(twin, None, inputs))
    # There is nothing to go back to.
    assert replaced(restore(model)) == {"quantize": 15}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_copies(copied):
    model, inputs = apply(wide(), quantize=4, keep_weights=False), tokens(1, 7)
    assert torch.equal(run(copied(model), None, inputs), run(model, None, inputs))


def test_others_keep_their_weights():
    """Tied heads, experts and GPT-2's layers have copies in few bits beside their weights."""
    tied = wide(tie_word_embeddings=True)
    apply(tied, quantize=4, keep_weights=False)
    assert not isinstance(tied.lm_head, FooPackedLinear)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert replaced(tied)["quantize"] == 15
    gpt2 = apply(wide("GPT2"), quantize=4, keep_weights=False)
    layer = gpt2.transformer.h[0].mlp.c_fc
    assert isinstance(layer, Conv1D)
    assert layer.weight.is_floating_point()
    narrow = apply(nn.Linear(31, 4), quantize=4, keep_weights=False)
    assert narrow.weight.shape == (4, 31)


@pytest.mark.parametrize("length", [1, 5])
def test_layers_with_the_same_input_are_joined(length, monkeypatch):
    """In one product, while no adapter, hook or act-order is in the way; in prompts, too."""
    model, inputs = apply(wide(), quantize=4, keep_weights=False).eval(), tokens(1, length)
    expected, widths = run(model, None, inputs), []
    product = quantized.quantized_product

    def counted(input, weight, *others):
        widths.append(len(weight))
        return product(input, weight, *others)

    monkeypatch.setattr(quantized, "quantized_product", counted)
    monkeypatch.setattr(packed, "quantized_product", counted)
    assert torch.equal(run(model, None, inputs), expected)
    # Query, key and value; output; gate and up; down; head.
    one = [64 + 16 + 16, 64, 128, 64]
    assert widths == [*one, *one, 97]
    layer, heard = model.model.layers[0].self_attn.k_proj, []
    layer.register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(run(model, None, inputs), expected)
    assert heard == [1]
    twin = copy.deepcopy(model).to("foo")
    torch.testing.assert_close(run(twin, None, inputs), expected)


def test_adapters_after_apply():
    peft = pytest.importorskip("peft")
    model, inputs = apply(wide(), quantize=4, keep_weights=False).eval(), tokens(1, 9)
    expected = run(model, None, inputs)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["k_proj", "up_proj"]))
    # New adapters add zero.
    assert torch.equal(run(adapted, None, inputs), expected)
    loss = adapted(input_ids=inputs, labels=inputs).loss
    loss.backward()
    trained = [it for it in adapted.parameters() if it.requires_grad]
    assert len(trained) == 8
    assert sum(bool(it.grad.any()) for it in trained) == 4


def test_quantize_is_needed():
    message = "apply: keep_weights=False needs quantize=4 or 8, got quantize=None"
    with pytest.raises(ValueError, match=exactly(message)):
        apply(wide(), keep_weights=False)


def test_training_says_what_is_trained(monkeypatch):
    model = apply(wide(), quantize=4, keep_weights=False).eval()
    said = []
    monkeypatch.setattr(packed.logger, "warning_once", said.append)
    model.train()
    assert set(said) == {
        "Weights of 4 and 8 bits stay as they are in training: only other parameters are trained, "
        "such as adapters (peft)."
    }
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        Trainer(model)


PACKING = """
import json, sys
import foo_ops.integrations.transformers as foo
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
small = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=9, num_attention_heads=2))
foo.apply(small, quantize=4, keep_weights=False)  # imports what it needs

def in_bytes(name):
    lines = dict(it.split(":") for it in open("/proc/self/status"))
    return 1024 * int(lines[name].split()[0])

before = in_bytes("VmRSS")
model = AutoModelForCausalLM.from_pretrained(sys.stdin.read())
foo.apply(model, quantize=4, keep_weights=False)
print(json.dumps(in_bytes("VmRSS") - before))
"""


@pytest.mark.whole
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_loaded_model_shrinks(tmp_path):
    """Its weights lie in a file that stays mapped for the embedding."""
    sizes = {"hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 3}
    model = LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=1000, num_attention_heads=16)
    ).bfloat16()
    model.save_pretrained(tmp_path)
    size = (tmp_path / "model.safetensors").stat().st_size
    assert 170e6 < size < 220e6
    process = python(PACKING, input=str(tmp_path), new=True)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1]) <= 0.6 * size


@pytest.mark.parametrize("bits", [8, 4])
def test_experts(bits, tmp_path, device):
    """They are freed too, if the layers that a model fuses have names in its files."""
    name = "qwen2_moe: windows that only the mask tells of"
    wide(name).save_pretrained(tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", device_map=device)
    inputs, twin = tokens(2, 12), exact_copy(model)
    twin.set_experts_implementation("eager")
    for module in twin.modules():
        if type(module) is nn.Linear:
            module.weight = rounded(module.weight, bits, False)
        elif hasattr(module, "has_gate"):
            for weight in ("gate_up_proj", "down_proj"):
                setattr(module, weight, rounded(getattr(module, weight), bits, False))
    with Doubles():
        exact = run(twin, "eager", inputs)
    weights = [weakref.ref(layer.mlp.experts.gate_up_proj) for layer in model.model.layers]
    apply(model, quantize=bits)
    apply(model, quantize=bits, keep_weights=False)
    assert not any(it() is not None for it in weights)
    assert all(isinstance(it.mlp.experts, FooPackedExperts) for it in model.model.layers)
    assert_near(run(model, None, inputs), exact, roundings=128)
    save_quantized(model, tmp_path)
    again = apply(AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device))
    assert replaced(again)["quantize"] == replaced(model)["quantize"]
    assert torch.equal(run(again, None, inputs), run(model, None, inputs))


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_saved_models_are_read_exactly(bits, dtype, tmp_path):
    model, inputs = wide(dtype=dtype), tokens(2, 12)
    apply(model, quantize=bits, keep_weights=False)
    save_quantized(model, tmp_path)
    again = apply(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert again.dtype == dtype
    assert replaced(again) == replaced(model)
    before = model.state_dict()
    assert again.state_dict().keys() == before.keys()
    assert all(torch.equal(it, before[name]) for name, it in again.state_dict().items())
    if (
        dtype == torch.float32
    ):  # in which the buffers of a converted model are those of a loaded one
        assert torch.equal(run(again, None, inputs), run(model, None, inputs))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bits", [8, 4])
def test_compressed_tensors_reads_saved_models(bits, tie, tmp_path):
    pytest.importorskip("compressed_tensors")
    model, inputs = wide(tie_word_embeddings=tie), tokens(2, 12)
    twin = with_rounded_weights(model, bits)
    if tie:
        twin.lm_head.weight = twin.model.embed_tokens.weight
    apply(model, quantize=bits, keep_weights=False)
    save_quantized(model, tmp_path)
    with Doubles():
        exact = run(twin, "eager", inputs)
    # transformers' own; without dequantize it takes no packed zeros.
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert not replaced(theirs)
    assert_near(run(theirs, "eager", inputs), exact, roundings=256)


def gptq_folder(folder, **options):
    described = {"quant_method": "gptq", "bits": 4, "group_size": 64}

    def make_layer(rows, columns):
        return gptq(rows, columns, 64, **options)

    write_checkpoint(folder, make_layer, described, num_hidden_layers=1)
    return AutoModelForCausalLM.from_pretrained(folder)


def test_other_formats_are_converted(tmp_path):
    model, inputs = gptq_folder(tmp_path / "gptq"), tokens(2, 12) % 50
    save_quantized(model, tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(run(again, None, inputs), run(model, None, inputs))
    # The model itself is still of its format.
    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(tmp_path / it / "model.safetensors") for it in ("gptq", "again"))
    assert before.keys() == after.keys()


def test_a_quantised_checkpoint_is_quantised_further(tmp_path):
    """Its head gets 4 bits too, in the one format that has both."""
    model, inputs = gptq_folder(tmp_path / "gptq", has_order=True), tokens(2, 12) % 50
    apply(model, quantize=4, keep_weights=False)
    assert replaced(model)["quantize"] == 8
    model.save_pretrained(tmp_path / "saved")
    again = apply(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    assert replaced(again)["quantize"] == 8
    assert torch.equal(run(again, None, inputs), run(model, None, inputs))


def test_refused(tmp_path):
    message = (
        "save_quantized: model must have weights of 4 or 8 bits, as after "
        "apply(model, quantize=4, keep_weights=False), got none"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        save_quantized(wide(), tmp_path)
    model = gptq_folder(tmp_path / "gptq", has_order=True)
    message = (
        "save_quantized: the inputs of all layers must be in their own order, got act-order in "
        "model.layers.0.self_attn.q_proj; save_pretrained writes the format that was read"
    )
    with pytest.raises(ValueError, match=exactly(message)):
        save_quantized(model, tmp_path)
