"""Models of GGUF files, and checks that hold for all of them."""

import pytest
import torch
from support.exact import assert_near
from transformers import AutoModelForCausalLM

from foo_ops.integrations.transformers import save_quantized


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)


def tokens(count=9):
    return torch.randint(96, (2, count), generator=torch.Generator().manual_seed(0))


def logits_of(model, count=9):
    device = model.model.norm.weight.device
    with torch.no_grad():
        return model(tokens(count).to(device)).logits


def check_generation(model, exact, count):
    found = model.generate(tokens()[:1], max_new_tokens=count, do_sample=False)
    # Each token has the largest logit, but for the errors of float32.
    with torch.no_grad():
        logits = exact(found[:, :-1]).logits[0, 8:]
    chosen = logits.gather(1, found[0, 9:, None])[:, 0]
    assert bool((logits.amax(1) - chosen <= 1e-4 * logits.abs().amax(1)).all())


def check_gradients_of_inputs_and_norms(ours, exact):
    gradients = []
    for model in (ours, exact):
        embedded = exact.model.embed_tokens(tokens()).detach().to(model.dtype).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=tokens()).loss
        gradients.append(torch.autograd.grad(loss, [embedded, model.model.norm.weight]))
    for own, other in zip(*gradients):
        assert_near(own, other, roundings=256)


def check_is_not_written(model, folder):
    message = (
        "save_quantized: model must not be from a GGUF file, whose groups compressed-tensors does "
        "not have"
    )
    with pytest.raises(ValueError, match=f"^{message}$"):
        save_quantized(model, folder)
