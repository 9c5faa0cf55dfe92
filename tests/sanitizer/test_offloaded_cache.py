"""The offloaded cache of transformers, on its own stream, waits where it must."""

import pytest
import torch

from foo_ops import sanitizer

transformers = pytest.importorskip("transformers")


class Forgetful(torch.Stream):
    """A stream that does not wait for others."""

    def wait_stream(self, stream):
        pass


def findings_of_generation(monkeypatch):
    # The cache asks for CUDA's default stream on any device.
    monkeypatch.setattr(torch.cuda, "default_stream", torch.foo.default_stream)
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    model = transformers.LlamaForCausalLM(config).to("foo").eval()
    ids = torch.arange(16, device="foo")[None]
    with sanitizer.check() as findings:
        model.generate(
            ids,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            cache_implementation="offloaded",
        )
    return findings


def test_as_it_is(monkeypatch):
    assert findings_of_generation(monkeypatch) == []


def test_without_its_wait(monkeypatch):
    monkeypatch.setattr(torch, "Stream", Forgetful)
    kinds = {finding.kind for finding in findings_of_generation(monkeypatch)}
    assert kinds == {"race", "use after free"}
