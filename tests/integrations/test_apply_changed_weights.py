"""Layers with a copy of their weight in 8 or 4 bits, when the weight changes."""

import copy
import pickle
import threading

import pytest
import torch
import torch._dynamo.testing
import transformers
from support.exact import Doubles, assert_near, exact_copy
from support.transformer_models import GROUPED, decoder, run, tokens
from torch import nn
from torch.func import functional_call, grad
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

import foo_ops
from foo_ops.integrations.transformers import apply, quantized, restore
from foo_ops.integrations.transformers.quantized import (
    FEWER_SAMPLES,
    LEAST_OF_PART,
    MANY_ROWS,
    PARTS,
    ROWS_FOR_ALL,
    SMALL,
)

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS, OUTPUTS = 128, 96
LAYERS = {"linear": lambda: nn.Linear(INPUTS, OUTPUTS), "conv1d": lambda: Conv1D(OUTPUTS, INPUTS)}
assert INPUTS * OUTPUTS > SMALL


def layer_of(kind, bits=8):
    torch.manual_seed(0)
    return apply(nn.Sequential(LAYERS[kind]()).eval(), quantize=bits)


def quantised_again(model, bits=8):
    return apply(restore(copy.deepcopy(model)), quantize=bits)


def noise(weight):
    return 0.3 * torch.randn_like(weight)


def merge(layer):
    """Change the weight as peft does to merge an adapter."""
    layer.weight.data += noise(layer.weight.data)


def merge_safely(layer):
    """Change the weight as peft does with ``safe_merge=True``."""
    layer.weight.data = layer.weight.data + noise(layer.weight.data)


def come_back(layer):
    """Replace the weight until a new one has its address, with one number changed."""
    place, numbers = layer.weight.data_ptr(), layer.weight.detach().clone()
    numbers[3, 5] = 9.0
    for _ in range(50):
        layer.weight.data = numbers.clone()
        if layer.weight.data_ptr() == place:
            break


def take_a_step(layer):
    layer.weight.grad = noise(layer.weight)
    torch.optim.AdamW(layer.parameters(), lr=0.1).step()


def exchange(layer):
    other = nn.Parameter(noise(layer.weight))
    torch.utils.swap_tensors(layer.weight, other)


def change_one_number(layer):
    with torch.no_grad():
        layer.weight[3, 5] = 9.0


def load(layer, **options):
    layer.load_state_dict({k: noise(it) for k, it in layer.state_dict().items()}, **options)


def append_a_token(layer):
    layer.weight.data[-1] = noise(layer.weight.data[-1])


CHANGES = {
    "merged": merge,
    "merged safely": merge_safely,
    "its memory again": come_back,
    "data.copy_": lambda layer: layer.weight.data.copy_(noise(layer.weight)),
    "in another order": lambda layer: setattr(layer.weight, "data", layer.weight.data.flip(0)),
    "a step": take_a_step,
    "foreach": lambda layer: torch._foreach_mul_([layer.weight.data], 2.0),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "one number": change_one_number,
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(noise(layer.weight))),
    "swapped": exchange,
    "loaded": load,
    "loaded by assignment": lambda layer: load(layer, assign=True),
    "vector": lambda layer: nn.utils.vector_to_parameters(
        torch.randn(INPUTS * OUTPUTS), [layer.weight]
    ),
    "numpy": lambda layer: layer.weight.detach().numpy().fill(0.5),
    "the last row": append_a_token,
    "dtype": lambda layer: layer.double(),
    "device": lambda layer: merge(layer.to("foo")),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", LAYERS)
def test_changed_weights_count(kind, change):
    for bits in (8, 4):
        model, input = layer_of(kind, bits), torch.randn(3, INPUTS)
        with torch.no_grad():
            before = model(input)
            CHANGES[change](model[0])
            input = input.to(model[0].weight)
            result, expected = model(input), quantised_again(model, bits)(input)
        assert torch.equal(result, expected)
        assert change == "dtype" or not torch.allclose(result.cpu(), before)


def test_compiled_graphs_see_changes(fresh_compiler):
    """No recompilation, except for another dtype; also after the copy was made again."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for kind in LAYERS:
        model, input = layer_of(kind), torch.randn(3, INPUTS)
        compiled, counter.frame_count = torch.compile(model, backend=counter, fullgraph=True), 0
        with torch.no_grad():
            compiled(input)
            for name in ("merged", "merged safely", "one number", "loaded", "another parameter"):
                CHANGES[name](model[0])
                result, expected = compiled(input), quantised_again(model)(input)
                assert torch.equal(result, expected), name
                assert torch.equal(model(input), expected), name
            assert counter.frame_count == 1
            model[0].double()
            assert torch.equal(compiled(input.double()), quantised_again(model)(input.double()))


def change_unseen(model):
    """Change one number that neither the version counter nor the sample shows."""
    model[0].weight.data[3, 5] = 9.0


SIGHTS = {
    "eval": lambda model, input: model.eval()(input),
    "many rows": lambda model, input: model(input.expand(MANY_ROWS, -1)),
}


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("kind", LAYERS)
def test_single_numbers_are_seen(kind, sight):
    """By ``eval()``, and in calls so long that all numbers can be compared."""
    model, input = layer_of(kind), torch.randn(1, INPUTS)
    with torch.no_grad():
        model(input)
        change_unseen(model)
        result, expected = SIGHTS[sight](model, input), quantised_again(model)(input)
    torch.testing.assert_close(result[:1], expected)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("rows", "most"), [(MANY_ROWS, PARTS), (ROWS_FOR_ALL, 1)])
def test_single_numbers_of_large_weights_are_seen_in_turns(rows, most, kind):
    """Also the last numbers, which fill no eight bytes, wherever they are."""
    inputs, outputs = 515, 1027
    assert inputs * outputs > PARTS * LEAST_OF_PART
    layer = Conv1D(outputs, inputs) if kind == "conv1d" else nn.Linear(inputs, outputs)
    model, input = apply(nn.Sequential(layer).eval(), quantize=8), torch.randn(rows, inputs)
    with torch.no_grad():
        model(input)
        for number in (0, inputs * outputs // 3, inputs * outputs - 1):
            layer.weight.data.view(-1)[number] = 3.0 + number
            found = sum(
                not torch.equal(model(input), quantised_again(model)(input)) for _ in range(most)
            )
            assert found < most, number
            assert torch.equal(model(input), quantised_again(model)(input))


def exchange_halves(rows):
    rows.copy_(torch.cat(rows.chunk(2)[::-1]))


@pytest.mark.parametrize("change", [lambda rows: rows.add_(0.1), exchange_halves])
@pytest.mark.parametrize("calls", range(10))
def test_changes_of_most_numbers_are_seen_by_the_next_call(calls, change):
    """In parts of the weight that the call does not compare as a whole."""
    rows, width = 1027, 515
    model, input = nn.Sequential(nn.Linear(width, rows)).eval(), torch.randn(MANY_ROWS, width)
    apply(model, quantize=8)
    with torch.no_grad():
        for _ in range(calls):
            model(input)
        change(model[0].weight.data[-(-rows * (calls + 1) // PARTS) :])
        assert torch.equal(model(input), quantised_again(model)(input))


@pytest.mark.parametrize("rows", [MANY_ROWS, 8 * MANY_ROWS])
def test_long_calls_compare_all_of_the_sample_in_turns(rows, monkeypatch):
    """Also with other calls between them."""
    compared, whole = set(), quantized.holds_sample

    def spied(weight, first, step, sample, begin, every):
        if every > 1:
            compared.update(range(begin, len(sample), every))
        return whole(weight, first, step, sample, begin, every)

    monkeypatch.setattr(quantized, "holds_sample", spied)
    model, input = nn.Sequential(nn.Linear(515, 1027)).eval(), torch.randn(rows, 515)
    apply(model, quantize=8)
    with torch.no_grad():
        for _ in range(FEWER_SAMPLES):
            model(input)
            model(input[:1])
    assert compared == set(range(len(quantized.sample_of(model[0].weight))))


@pytest.mark.parametrize("sight", SIGHTS.values(), ids=SIGHTS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows"), [(16, 48, 2), (128, 96, 2), (512, 512, 256)]
)
def test_another_order_in_place_is_seen(inputs, outputs, rows, sight):
    """The totals of a part do not change with the order of its numbers."""
    model, input = nn.Sequential(nn.Linear(inputs, outputs)).eval(), torch.randn(1, inputs)
    apply(model, quantize=8)
    with torch.no_grad():
        model(input)
        for some in model[0].weight.data.split(rows)[::3]:
            some.copy_(some.unflatten(0, (-1, 2)).flip(1).flatten(0, 1))
            result, expected = sight(model, input), quantised_again(model)(input)
            torch.testing.assert_close(result[:1], expected)


@pytest.mark.parametrize("index", [(3, 5), (0,), (20,), (slice(None), slice(3))])
def test_small_weights_are_seen_as_a_whole_and_others_in_each_row(index):
    width = 16 if len(index) == 2 and index[0] == 3 else 64
    model = apply(nn.Sequential(nn.Linear(width, 48)).eval(), quantize=8)
    with torch.no_grad():
        input = torch.randn(1, width)
        model(input)
        model[0].weight.data[index] = 0.7
        assert torch.equal(model(input), quantised_again(model)(input))


def test_evaluation_between_steps():
    """The loss is that of the current weights, not of those before the training."""
    torch.manual_seed(0)
    model, input = nn.Sequential(nn.Linear(INPUTS, 64), nn.SiLU(), nn.Linear(64, 8)), None
    model, input, target = apply(model, quantize=8), torch.randn(32, INPUTS), torch.randn(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        loss = nn.functional.mse_loss(model.train()(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        evaluated = nn.functional.mse_loss(model.eval()(input), target)
    assert evaluated < 1.2 * loss + 0.01


def test_a_copy_of_what_has_changed():
    for copied in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        for change in (merge, change_one_number, merge_safely):
            model, input = layer_of("linear"), torch.randn(3, INPUTS)
            change(model[0])
            with torch.no_grad():
                assert torch.equal(copied(model)(input), quantised_again(model)(input))


def test_moved_copies_are_not_made_again(monkeypatch):
    model = layer_of("linear")
    with monkeypatch.context() as patch:
        patch.setattr(foo_ops.integrations.transformers.quantized, "make_copy", None)
        for way in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it)), lambda it: it):
            moved = way(model).to("foo")
            moved.eval()(torch.randn(3, INPUTS, device="foo"))


def test_joined_layers_see_changes():
    model, inputs = decoder("llama", hidden_size=64, num_attention_heads=8), tokens(1, 9)
    model = apply(model, quantize=8)

    def decode(it):
        cache = DynamicCache()
        with torch.no_grad():
            calls = inputs.split([5, 1, 1, 2], 1)
            parts = [it(part, past_key_values=cache).logits for part in calls]
        return torch.cat(parts, 1)

    decode(model)
    for name, change in (("q_proj", merge), ("v_proj", merge_safely), ("k_proj", take_a_step)):
        change(model.model.layers[0].self_attn.get_submodule(name))
        change(model.model.layers[1].mlp.up_proj)
        assert torch.equal(decode(model), decode(quantised_again(model))), name


def test_tied_weights():
    config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": 300}, tie_word_embeddings=True)
    model = apply(transformers.LlamaForCausalLM(config).eval(), quantize=8)
    inputs = tokens(1, 5)
    run(model, "foo", inputs)
    embeddings = model.get_input_embeddings()
    assert embeddings.weight is model.lm_head.weight
    assert embeddings.weight.numel() > SMALL
    merge(embeddings)
    assert torch.equal(run(model, "foo", inputs), run(quantised_again(model), "foo", inputs))


def test_threads_make_one_copy():
    model, input, outputs = layer_of("linear"), torch.randn(3, INPUTS), []

    def call():
        with torch.no_grad():
            outputs.append(model(input))

    for _ in range(20):
        outputs.clear()
        merge(model[0])
        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            expected = quantised_again(model)(input)
        assert len(outputs) == 4
        assert all(torch.equal(it, expected) for it in outputs)


def test_inference_mode():
    """Copies made in inference mode are ordinary tensors, and changes of its weights are seen."""
    model, input = layer_of("linear"), torch.randn(3, INPUTS, requires_grad=True)
    with torch.inference_mode():
        model[0].weight.data = model[0].weight.data.double()
        model[0].bias.data = model[0].bias.data.double()
        result = model(input.double())
    model(input.double()).sum().backward()
    assert torch.equal(model(input.double()), result)
    with torch.inference_mode():
        model = layer_of("linear")
        model[0].weight.mul_(2)
        assert torch.equal(model(input), quantised_again(model)(input))


# ---------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", ["Qwen3", "GPT2"])
def test_no_parameter_loses_its_gradient_in_eval(name, bits):
    """Gradients are those of the model with rounded weights; recording them changes no value."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8}
    model, inputs = decoder(name, **sizes), tokens(2, 9)
    twin = exact_copy(model)
    for layer in twin.modules():
        if type(layer) in (nn.Linear, Conv1D):
            weight = layer.weight.detach().float()
            weight = weight.t() if type(layer) is Conv1D else weight
            options = {"group_size": 64} if bits == 4 else {}
            rounded = foo_ops.dequantize_weight(*foo_ops.quantize_weight(weight, bits, **options))
            rounded = rounded.t() if type(layer) is Conv1D else rounded
            layer.weight = nn.Parameter(rounded.double())
    if name == "GPT2":
        twin.lm_head.weight.requires_grad_()
    ours = apply(model, quantize=bits)
    with Doubles():
        twin(inputs).logits.square().mean().backward()
    output = ours(inputs).logits
    output.square().mean().backward()
    with torch.no_grad():
        assert torch.equal(ours(inputs).logits, output)
    if ours.config.tie_word_embeddings:
        twin.transformer.wte.weight.grad += twin.lm_head.weight.grad
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        assert_near(parameter.grad, twin.get_parameter(key).grad, roundings=256)


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_of_one_layer(kind, fresh_compiler):
    """Under autocast, compiled, by torch.func, and with frozen weights."""
    model, input = layer_of(kind), torch.randn(2, 3, INPUTS)
    with torch.autocast("cpu", torch.bfloat16):
        model(input).sum().backward()
    weight = model[0].weight
    assert weight.grad.dtype == torch.float32
    sums = input.double().sum((0, 1)).expand(OUTPUTS, INPUTS)
    exact = sums.t() if kind == "conv1d" else sums
    assert_near(weight.grad, exact, torch.bfloat16)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    compiled(input).sum().backward()
    assert_near(weight.grad, exact)
    gradients = grad(lambda it: functional_call(model, it, (input,)).sum())(
        dict(model.named_parameters())
    )
    assert_near(gradients["0.weight"], exact)
    model.requires_grad_(False)
    assert not model(input).requires_grad
