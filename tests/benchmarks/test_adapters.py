"""The table of adapters: both contenders train, and their weights are counted."""

import pytest

from benchmarks import adapters, models
from benchmarks.measure import prepare


@pytest.mark.parametrize("bits", [4, 8])
def test_adapters_are_trained(bits):
    pytest.importorskip("peft")
    model = adapters.adapted(models.QUICK, bits)
    trained = {name for name, it in model.named_parameters() if it.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    speed, memory = (
        it for it in adapters.cases(models.QUICK, 1) if it.name.startswith(f"Llama of {bits} bits")
    )
    contenders, failures = prepare(speed)
    assert len(contenders) == 2
    assert not failures
    ours, theirs = (make().time(1, 1) for make in memory.prepare().values())
    # Besides its integers a weight has a scale and a zero of bfloat16 for each 32 or 64.
    assert bits / 16 < ours / theirs <= bits / 16 + 2 / 32
