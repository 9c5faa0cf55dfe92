"""Replaced modules return the same as their own forward: dtype, strides, values, and errors."""

import copy
import itertools

import pytest
import torch
import transformers
from support.exact import Doubles, exact_copy
from support.parts import whole
from support.transformer_models import GROUPED, VOCABULARY, decoder, tokens
from support.transformer_models import build as build_model
from torch import nn
from transformers import DynamicCache
from transformers.models.bert.modeling_bert import BertIntermediate, BertSelfOutput
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
)
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.t5.modeling_t5 import T5DenseGatedActDense, T5LayerNorm
from transformers.pytorch_utils import Conv1D

from foo_ops.integrations.transformers import apply, replaced

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 64
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INPUTS = (*FLOATING, torch.int64, torch.complex64, torch.float8_e4m3fn)
AUTOCAST = (None, torch.bfloat16, torch.float16)
ROUNDINGS = 32

SIZES = {
    **GROUPED,
    "hidden_size": WIDTH,
    "num_attention_heads": 8,
    "attn_implementation": "eager",
}
T5 = transformers.T5Config(d_model=WIDTH, d_ff=48, feed_forward_proj="gated-gelu")
LLAMA = transformers.LlamaConfig(**SIZES)
BERT = transformers.BertConfig(hidden_size=WIDTH, num_attention_heads=8, intermediate_size=48)
MODULES = {
    "llama norm": lambda: LlamaRMSNorm(WIDTH),
    "gemma norm": lambda: GemmaRMSNorm(WIDTH),
    "t5 norm": lambda: T5LayerNorm(WIDTH),
    "gpt-oss norm": lambda: GptOssRMSNorm(WIDTH),
    "torch norm": lambda: nn.RMSNorm(WIDTH, eps=1e-6),
    "torch layer norm": lambda: nn.LayerNorm(WIDTH),
    "layer norm without bias": lambda: nn.LayerNorm(WIDTH, eps=1e-12, bias=False),
    "cohere norm": lambda: CohereLayerNorm(WIDTH),
    "deberta norm": lambda: DebertaLayerNorm(WIDTH),
    "nemotron norm": lambda: NemotronLayerNorm1P(WIDTH),
    "bert output": lambda: BertSelfOutput(BERT),
    "linear": lambda: nn.Linear(WIDTH, 48),
    "linear without bias": lambda: nn.Linear(WIDTH, 48, bias=False),
    "conv1d": lambda: Conv1D(48, WIDTH),
    "bert intermediate": lambda: BertIntermediate(BERT),
    "gpt2 mlp": lambda: GPT2MLP(48, transformers.GPT2Config(n_embd=WIDTH)),
    "t5 mlp": lambda: T5DenseGatedActDense(T5),
    "gemma mlp": lambda: GemmaMLP(transformers.GemmaConfig(**SIZES)),
    "llama mlp": lambda: LlamaMLP(LLAMA),
    "phi3 mlp": lambda: Phi3MLP(transformers.Phi3Config(**SIZES)),
    "llama layer": lambda: LlamaDecoderLayer(LLAMA, 0),
    "qwen3 layer": lambda: Qwen3DecoderLayer(transformers.Qwen3Config(**SIZES), 0),
    "gemma2 layer": lambda: Gemma2DecoderLayer(transformers.Gemma2Config(**SIZES), 0),
}
QUANTISED = [(name, 8) for name in ("linear", "conv1d", "llama mlp", "llama layer")]
QUANTISED += [("linear without bias", 4)]
QUANTISED_ROOM = {8: 0.03, 4: 0.3}


def build(name):
    torch.manual_seed(0)
    module = MODULES[name]().eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def converted(module, mix):
    """Return a copy whose parameters have the dtypes of ``mix``, in turn."""
    made = copy.deepcopy(module)
    for parameter, dtype in zip(made.parameters(), itertools.cycle(mix)):
        parameter.data = parameter.data.to(dtype)
    return made


def call(module, input, tables, autocast=None):
    options = {}
    if isinstance(module, BertSelfOutput):
        options = {"input_tensor": input.flip(0)}
    if isinstance(getattr(module, "self_attn", None), nn.Module):
        options = {"position_embeddings": tuple(tables)}
    enabled = autocast is not None
    with torch.no_grad(), torch.autocast("cpu", autocast or torch.bfloat16, enabled=enabled):
        return module(input, **options)


def outcome(*arguments):
    """Return a call's result, or its error."""
    try:
        return call(*arguments)
    except Exception as error:
        return error


def assert_same(ours, theirs, exact, room, case):
    if isinstance(theirs, Exception):
        assert (type(ours), str(ours)) == (type(theirs), str(theirs)), case
        return
    assert isinstance(ours, torch.Tensor), (case, ours)
    described = [(it.dtype, it.shape, it.stride()) for it in (ours, theirs)]
    assert described[0] == described[1], case
    if theirs.is_floating_point():
        off, theirs_off = ((it.double() - exact).norm() for it in (ours, theirs))
        assert off <= 1.5 * theirs_off + room * exact.norm(), case


MIXES = [(dtype,) for dtype in FLOATING]
MIXES += [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
"""Dtypes of a module's parameters: one for all, and two in turn."""


def cases(name, layout):
    """Return a module with parameters of each mix, and the inputs to call it with."""
    module, input = build(name), 0.5 * torch.randn(2, 5, WIDTH)
    angles = torch.randn(1, 5, 4).repeat(1, 1, 2)
    if layout == "transposed":
        input = input.transpose(0, 1).contiguous().transpose(0, 1)
    dtypes = INPUTS if layout == "contiguous" else FLOATING
    for mix in MIXES:
        own = converted(module, mix)
        calls = []
        for dtype, autocast in itertools.product(dtypes, AUTOCAST):
            for table in {dtype, torch.float32} if "layer" in name else {dtype}:
                tables = [it.to(table) for it in (angles.cos(), angles.sin())]
                calls.append((input.to(dtype), tables, autocast))
        yield own, calls


def exactly(twin, input, tables):
    with Doubles():
        return outcome(twin, input.to(torch.float64), [it.to(torch.float64) for it in tables])


@pytest.mark.filterwarnings("ignore:Casting complex", "ignore:Mismatch dtype")
@pytest.mark.parametrize("layout", ["contiguous", *whole("transposed")])
@pytest.mark.parametrize("name", MODULES)
def test_dtypes(name, layout):
    for own, calls in cases(name, layout):
        ours, twin = apply(copy.deepcopy(own)), exact_copy(own)
        assert replaced(ours)
        weights = {it.dtype for it in own.parameters()}
        for input, tables, autocast in calls:
            kinds = {input.dtype, autocast, torch.float32, *weights} & set(FLOATING)
            room = ROUNDINGS * max(torch.finfo(it).eps for it in kinds)
            results = [outcome(it, input, tables, autocast) for it in (ours, own)]
            case = (weights, input.dtype, tables[0].dtype, autocast)
            assert_same(*results, exactly(twin, input, tables), room, case)


@pytest.mark.filterwarnings("ignore:Casting complex")
@pytest.mark.parametrize(("name", "bits"), QUANTISED)
def test_dtypes_of_quantised_layers(name, bits):
    for own, calls in cases(name, "contiguous"):
        ours, twin = apply(copy.deepcopy(own), quantize=bits), exact_copy(own)
        assert replaced(ours)["quantize"]
        for input, tables, autocast in calls:
            results = [outcome(it, input, tables, autocast) for it in (ours, own)]
            case = (input.dtype, tables[0].dtype, autocast)
            assert_same(*results, exactly(twin, input, tables), QUANTISED_ROOM[bits], case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_that_keep_some_weights_in_float32(dtype):
    """T5 does, so its norms get float32 inputs with weights in half precision."""
    sizes = {"d_model": 48, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 6}
    config = transformers.T5Config(**sizes, vocab_size=VOCABULARY, decoder_start_token_id=0)
    model = build_model(transformers.AutoModelForSeq2SeqLM, lambda: config, dtype=dtype)
    for name, module in model.named_modules():
        if name.endswith("wo"):
            module.float()
    inputs, ours = tokens(2, 9), apply(copy.deepcopy(model))
    with torch.no_grad():
        results = [it(inputs, decoder_input_ids=inputs).logits for it in (ours, model)]
    twin = exact_copy(model)
    with Doubles():
        exact = twin(inputs, decoder_input_ids=inputs).logits.detach()
    room = ROUNDINGS * torch.finfo(dtype).eps
    assert_same(*results, exact, room, dtype)


@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_losses(dtype, autocast):
    """Also with head and loss as one operator, and with the user's own loss."""
    model, inputs = decoder("llama", dtype=dtype).train(), tokens(2, 14)
    twin = exact_copy(model)
    with Doubles():
        exact = twin(inputs, labels=inputs).loss.detach()
    results = []
    for it in (model, apply(copy.deepcopy(model), fused_loss=False), apply(copy.deepcopy(model))):
        enabled = autocast is not None
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=enabled):
            output = it(inputs, labels=inputs)
        output.loss.backward()
        gradients = {key: parameter.grad.dtype for key, parameter in it.named_parameters()}
        results.append((output.loss.detach(), gradients))
    (theirs, gradients), *ours = results
    for loss, own_gradients in ours:
        room = ROUNDINGS * torch.finfo(autocast or dtype).eps
        assert_same(loss, theirs, exact, max(room, 1e-5), (dtype, autocast))
        assert own_gradients == gradients


def test_logits_that_are_not_computed_have_the_dtype_of_autocast():
    model, inputs = apply(decoder("llama")).train(), tokens(2, 9)
    seen = []
    model.loss_function = lambda logits, labels, **others: seen.append(logits.dtype) or logits.sum()
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs, labels=inputs)
    assert seen == [torch.bfloat16]


# ------------------------------------------------------------------- other tensors than it has seen


class Logged(torch.Tensor):
    """A tensor type with its own products."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            return "its own product"
        return super().__torch_function__(function, types, args, kwargs or {})


def test_other_kinds_of_tensors_come_to_the_own_forward():
    layer = apply(nn.Sequential(nn.Linear(WIDTH, 3), nn.Identity()))
    assert layer(torch.randn(2, WIDTH).as_subclass(Logged)) == "its own product"
    sparse = torch.randn(2, WIDTH).relu().to_sparse()
    torch.testing.assert_close(layer(sparse), layer(sparse.to_dense()))


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:Casting complex")
def test_weights_that_are_put_in_place_later():
    for weight in (
        torch.randn(WIDTH, 48).t(),
        torch.randn(48, 2 * WIDTH)[:, ::2],
        torch.randn(1, WIDTH).expand(48, WIDTH),
        torch.randn(48, WIDTH).relu().to_sparse_csr(),
        torch.randn(48, WIDTH, dtype=torch.complex64),
    ):
        own = nn.Linear(WIDTH, 48, dtype=weight.dtype)
        ours = apply(nn.Sequential(copy.deepcopy(own).to(torch.float32)))[0]
        for layer in (own, ours):
            layer.weight = nn.Parameter(weight, requires_grad=False)
            layer.bias = own.bias
        input = torch.randn(3, WIDTH).to(weight.dtype)
        results = [outcome(it, input, ()) for it in (ours, own)]
        if isinstance(results[1], Exception):
            assert str(results[0]) == str(results[1])
        else:
            torch.testing.assert_close(*results)


@pytest.mark.parametrize("table", FLOATING)
@pytest.mark.parametrize("dtype", FLOATING)
def test_dtypes_of_a_decoding_step(dtype, table):
    """With a cache, and with cosine and sine tables in another dtype."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SIZES, "attn_implementation": "foo"})
    own = LlamaAttention(config, 0).to(dtype).eval()
    input, angles = torch.randn(2, 4, WIDTH).to(dtype), torch.randn(1, 4, 4).repeat(1, 1, 2)
    tables = angles.cos().to(table), angles.sin().to(table)

    def decode(layer):
        cache, outputs = DynamicCache(), []
        for position in range(4):
            turns = tuple(it[:, position : position + 1] for it in tables)
            given = input[:, position : position + 1]
            try:
                outputs.append(layer(given, turns, None, past_key_values=cache)[0])
            except Exception as error:
                outputs.append(error)
        return outputs

    with torch.no_grad():
        pairs = zip(decode(apply(copy.deepcopy(own))), decode(own), strict=True)
    for ours, theirs in pairs:
        if isinstance(theirs, Exception):
            assert str(ours) == str(theirs)
        else:
            assert_same(ours, theirs, theirs.double(), ROUNDINGS * torch.finfo(dtype).eps, table)
