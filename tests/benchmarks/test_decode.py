"""The table of decoded tokens: its rows, and the parts of a token."""

import time

import pytest
import torch

from benchmarks import decode, report
from benchmarks.measure import Limits, measure
from benchmarks.models import AS_IT_IS

TINY = Limits(rounds=1, turn=1e-6, contender=1.0, fewest=1)


def test_rows():
    pytest.importorskip("transformers")
    assert decode.SECTION in report.SECTIONS
    cases = {it.name: it for it in decode.cases(decode.QUICK, 2)}
    llamas = ["Llama 2 x 64, bfloat16", "Llama 1 x 64, bfloat16"]
    whisper = "Whisper 64, 8 tokens, bfloat16"
    generated = [f"{name}: {way}" for name in llamas for way in decode.GENERATE]
    assert set(cases) == {*llamas, *generated, whisper}
    for name in (llamas[0], f"{llamas[0]}: generate, top 50", whisper):
        rows = measure(cases[name], TINY)
        parts = decode.PARTS if name == llamas[0] else ()
        assert [it.name for it in rows] == [name, *(f"{name}: {it}" for it in parts)]
        assert all(it.peers() == [decode.FROM_PYTHON, AS_IT_IS] for it in rows)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("foo::linear", "products"),
        ("aten::mm", "products"),
        ("foo::moe_experts", "products"),
        ("foo::attention", "attention"),
        ("aten::add", "other operators"),
        (decode.SECTION, "between operators"),
    ],
)
def test_each_operator_is_in_one_part(name, part):
    assert decode.part_of(name) == part


def test_parts_of_a_token(monkeypatch):
    """Seconds are those of one of the profiled tokens, each in one part."""

    def work():
        for _ in range(decode.NARROW.decoded):
            with torch.profiler.record_function("attention"):
                time.sleep(2e-3)
            torch.ones(64)

    monkeypatch.setattr(decode.models, "decoding", lambda model, size: decode.Local(work))
    parts = decode.Profiled(None, decode.NARROW).parts(1)
    assert list(parts) == list(decode.PARTS)
    assert 2e-3 < parts["attention"] < 2e-3 * decode.NARROW.decoded
    assert 0 < parts["other operators"] < 1e-3
    assert 0 < parts["between operators"] < 1e-3
    assert parts["products"] == 0
