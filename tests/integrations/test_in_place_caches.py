"""Caches of transformers that are written in place return the tensors that they were given."""

import collections
import copy
import pickle

import pytest
import torch
import transformers
from support.transformer_models import GROUPED, decoder, run, tokens
from transformers import DynamicCache, StaticCache

from foo_ops import quantize_cache
from foo_ops.integrations.transformers import apply, in_place_cache
from foo_ops.integrations.transformers.cache import GrowingLayer

pytestmark = pytest.mark.usefixtures("one_thread")

LLAMA = "llama"


def steps(cache, count, batch=2, start=0):
    generator = torch.Generator().manual_seed(start)
    for _ in range(count):
        key, value = torch.randn(2, batch, 3, 1, 4, generator=generator).unbind()
        yield key, value, cache.update(key, value, 0)


def test_growing_cache_holds_what_it_was_given():
    cache, keys = in_place_cache(DynamicCache()), []
    addresses = set()
    for key, value, held in steps(cache, 300):
        keys.append(key)
        addresses.add(held[0].data_ptr())
        all_keys, all_values, last = *held, value
    assert torch.equal(all_keys, torch.cat(keys, 2))
    assert torch.equal(all_values[:, :, -1:], last)
    assert len(addresses) == 4
    assert cache.get_seq_length() == 300


def changed(cache):
    for _ in steps(cache, 5):
        pass
    yield "cropped", lambda: cache.crop(-2)
    yield "in another order", lambda: cache.reorder_cache(torch.tensor([1, 1]))
    yield "repeated", lambda: cache.batch_repeat_interleave(2)
    yield "selected", lambda: cache.batch_select_indices(torch.tensor([3, 0, 2]))
    yield "emptied", lambda: cache.reset()


def test_growing_cache_can_be_changed():
    ours, theirs, batches = in_place_cache(DynamicCache()), DynamicCache(), [2, 2, 4, 3, 2]
    changes = zip(changed(ours), changed(theirs), batches, strict=True)
    for (name, change), (_, other), batch in changes:
        change()
        other()
        for cache in (ours, theirs):
            *_, results = steps(cache, 3, batch, start=batch)
            if cache is ours:
                expected = results[2]
        assert all(torch.equal(*pair) for pair in zip(expected, results[2])), name


def test_growing_cache_beside_gradients():
    cache = in_place_cache(DynamicCache())
    key = torch.randn(1, 2, 3, 4, requires_grad=True)
    for _ in range(2):
        keys, _ = cache.update(key, key, 0)
    keys.sum().backward()
    assert torch.equal(key.grad, torch.full_like(key, 2.0))
    with torch.no_grad():
        keys, _ = cache.update(key, key, 0)
    assert torch.equal(keys, torch.cat([key] * 3, 2))


@pytest.mark.parametrize("modes", [("inference", "no_grad"), ("no_grad", "inference")])
def test_growing_cache_goes_on_in_another_mode(modes):
    contexts = {"inference": torch.inference_mode, "no_grad": torch.no_grad}
    caches = [in_place_cache(DynamicCache()), DynamicCache()]
    key = torch.randn(1, 2, 3, 4)
    for mode in (*modes, *modes):
        with contexts[mode]():
            held = [cache.update(key, -key, 0) for cache in caches]
    assert all(map(torch.equal, *held))


def test_growing_cache_of_two_dtypes():
    caches = [in_place_cache(DynamicCache()), DynamicCache()]
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        key = torch.randn(1, 2, 3, 4).to(dtype)
        ours, theirs = (cache.update(key, key.half(), 0) for cache in caches)
        assert [it.dtype for it in ours] == [it.dtype for it in theirs]
        assert all(map(torch.equal, ours, theirs))
    # A narrower dtype does not copy the cached tensors.
    address = ours[0].data_ptr()
    assert caches[0].update(key, key.half(), 0)[0].data_ptr() == address


@pytest.mark.parametrize("bits", [None, 8])
def test_what_was_taken_from_a_growing_cache_stays(bits):
    """Cropped positions are not overwritten."""
    cache = in_place_cache(DynamicCache(), bits=bits)
    for _ in steps(cache, 6):
        pass
    taken = cache.layers[0].keys
    before = taken.clone()
    cache.crop(-3)
    for _ in steps(cache, 3, start=1):
        pass
    assert torch.equal(taken, before)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_cache_is_reordered_in_place_unless_others_hold_it(bits):
    caches = [in_place_cache(DynamicCache(), bits=bits), DynamicCache()]
    for cache in caches:
        collections.deque(steps(cache, 6, batch=3), maxlen=0)
    layer = caches[0].layers[0]
    address, held = layer.memory.tensors[0].data_ptr(), []
    for order in ([2, 0, 1], [0, 1, 2], [1, 1, 0], [2, 1, 0], [0, 1]):
        if order == [2, 1, 0]:
            held = [(it, it.clone()) for it in (layer.keys, layer.values)]
        for cache in caches:
            cache.reorder_cache(torch.tensor(order))
        *_, (_, _, ours) = steps(caches[0], 1, batch=len(order))
        *_, (_, _, theirs) = steps(caches[1], 1, batch=len(order))
        if bits is None:
            assert all(map(torch.equal, ours, theirs))
        else:
            torch.testing.assert_close([it.numbers() for it in ours], [*theirs], atol=0.03, rtol=0)
        assert (layer.memory.tensors[0].data_ptr() == address) == (not held)
        del ours
    assert all(torch.equal(*pair) for pair in held)


@pytest.mark.parametrize("bits", [None, 8])
def test_a_cropped_cache_that_nobody_else_holds_goes_on_in_place(bits):
    """Assisted generation crops in each step."""
    caches = [in_place_cache(DynamicCache(), bits=bits), DynamicCache()]
    for cache in caches:
        # A loop variable would keep a reference to the last result.
        collections.deque(steps(cache, 6), maxlen=0)
    address = caches[0].layers[0].keys.data_ptr()
    for start in range(8):
        for cache in caches:
            cache.crop(-3)
            collections.deque(steps(cache, 3, start=start), maxlen=0)
        assert caches[0].layers[0].keys.data_ptr() == address
    keys, values = caches[1].layers[0].keys, caches[1].layers[0].values
    wanted = [quantize_cache(it)[0] if bits else it for it in (keys, values)]
    assert torch.equal(caches[0].layers[0].keys, wanted[0])
    assert torch.equal(caches[0].layers[0].values, wanted[1])


@pytest.mark.parametrize("part", [lambda it: it[:, :, :2], lambda it: it.transpose(1, 2), list])
def test_parts_that_were_taken_from_a_growing_cache_stay(part):
    cache = in_place_cache(DynamicCache())
    collections.deque(steps(cache, 6), maxlen=0)
    taken = part(cache.layers[0].values)
    before = [it.clone() for it in taken]
    for start in range(3):
        cache.crop(-5)
        collections.deque(steps(cache, 5, start=start), maxlen=0)
    assert all(map(torch.equal, taken, before))


def pickled(layer):
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickled])
def test_copies_of_a_growing_cache(make, bits):
    """Each copy grows on its own; an update of one does not show in another."""
    caches = [in_place_cache(DynamicCache(), bits=bits), DynamicCache(), DynamicCache()]
    for _ in steps(caches[0], 6):
        pass
    for fork in caches[1:]:
        fork.layers = [make(it) for it in caches[0].layers]
    before, keys = caches[0].layers[0].keys.clone(), []
    for start, cache in enumerate(caches):
        *_, (key, _, _) = steps(cache, 2, start=start)
        keys.append(key)
    for key, cache in zip(keys, caches):
        held, _ = cache.update(key, key, 0)
        last = quantize_cache(key)[0] if bits else key
        assert held.shape[2] == 9
        assert torch.equal(cache.layers[0].keys[:, :, :6], before)
        assert torch.equal(cache.layers[0].keys[:, :, 7:], torch.cat([last, last], 2))


def gradients(model, cache, later):
    """Return the gradients of two calls with one cache."""
    inputs = tokens(2, 12)
    first = model(inputs[:, :6], past_key_values=cache).logits
    with later():
        second = model(inputs[:, 6:], past_key_values=cache).logits
    (first.square().sum() + second.square().sum()).backward()
    return [it.grad for it in model.parameters() if it.grad is not None]


@pytest.mark.parametrize("later", [torch.enable_grad, torch.no_grad])
def test_growing_cache_beside_gradients_of_the_query(later):
    """Keys without gradients are saved for the query's, and later keys are written after them."""
    results = []
    for change in (apply, lambda model: model):
        model = change(decoder(LLAMA)).requires_grad_(False)
        model.model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
        results.append(gradients(model, DynamicCache(), later))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_growing_cache_that_has_gradients():
    caches, results = [in_place_cache(DynamicCache()), DynamicCache()], []
    for cache in caches:
        key = torch.ones(1, 2, 3, 4, requires_grad=True)
        cache.update(key, key, 0)
        keys, _ = cache.update(key.detach(), key.detach(), 0)
        results.append(torch.autograd.grad(keys.sum(), key)[0])
    assert torch.equal(*results)


def test_static_cache_beside_gradients():
    results = []
    for change in (apply, lambda model: model):
        model = change(decoder(LLAMA))
        cache = StaticCache(config=model.config, max_cache_len=20)
        with torch.no_grad():
            model(tokens(2, 3), past_key_values=cache)
        model(tokens(2, 5), past_key_values=cache).logits.square().sum().backward()
        with torch.no_grad():
            output = model(tokens(2, 4), past_key_values=cache).logits
        results.append([output, *(it.grad for it in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_full_static_cache_refuses():
    config = transformers.LlamaConfig(**GROUPED)
    cache = in_place_cache(StaticCache(config=config, max_cache_len=2))
    for _ in steps(cache, 2):
        pass
    before = cache.layers[0].keys.clone()
    with pytest.raises(ValueError, match=r"cache_append: positions must be in \[0, 1\]"):
        next(steps(cache, 1))
    assert torch.equal(cache.layers[0].keys, before)


def test_model_takes_its_caches(monkeypatch):
    model, kinds = apply(decoder(LLAMA)), set()
    append = GrowingLayer.update

    def noted(self, *arguments, **keywords):
        kinds.add(type(self).__name__)
        return append(self, *arguments, **keywords)

    monkeypatch.setattr(GrowingLayer, "update", noted)
    cache = DynamicCache(config=model.config)
    run(model, "foo", tokens(2, 4), past_key_values=cache)
    assert kinds == {"GrowingLayer"}
    # A cache that the model makes is replaced in its second call.
    cache = model(tokens(1, 4), use_cache=True).past_key_values
    with torch.no_grad():
        model(tokens(1, 1), past_key_values=cache)
    assert type(cache.layers[0]).__name__ == "GrowingLayer"


@pytest.mark.parametrize("replaced", [("keys",), ("values",), ("keys", "values")], ids=str)
def test_others_may_replace_keys_or_values(replaced):
    ours, own = in_place_cache(DynamicCache()), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    for step in range(6):
        given = torch.randn(2, 1, 2, 3, 4, generator=generator).unbind()
        results = [cache.update(*given, 0) for cache in (ours, own)]
        assert all(map(torch.equal, *results))
        if step % 2:
            for layer in (ours.layers[0], own.layers[0]):
                for name in replaced:
                    setattr(layer, name, 2 * getattr(layer, name))
        assert ours.get_seq_length() == own.get_seq_length() == 3 * (step + 1)
        for name in ("keys", "values"):
            assert torch.equal(getattr(ours.layers[0], name), getattr(own.layers[0], name))


def test_an_offloaded_cache_on_the_cpu_goes_on_in_place():
    cache = in_place_cache(DynamicCache())
    addresses = set()
    for _ in range(9):
        cache.update(*torch.randn(2, 1, 2, 3, 4).unbind(), 0)
        layer = cache.layers[0]
        layer.offload()
        layer.prefetch()
        addresses.add(layer.keys.data_ptr())
    assert len(addresses) == 1


def test_keys_are_no_attributes_until_others_set_them():
    """A token would have to set them for each layer."""
    cache = in_place_cache(DynamicCache())
    cache.update(*torch.randn(2, 1, 2, 3, 4).unbind(), 0)
    layer = cache.layers[0]
    assert not {"keys", "values"} & vars(layer).keys()
    assert layer.own_memory() is not None
    layer.keys = layer.keys
    assert layer.own_memory() is not None
    layer.keys = layer.keys.clone()
    assert layer.own_memory() is None
