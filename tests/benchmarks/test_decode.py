"""The table of decoded tokens: its rows, and the parts of a token."""

import pytest
import torch

from benchmarks import decode, report
from benchmarks.measure import Limits, measure
from benchmarks.models import AS_IT_IS

TINY = Limits(rounds=1, turn=1e-6, contender=1.0, fewest=1)


def test_rows():
    pytest.importorskip("transformers")
    assert decode.SECTION in report.SECTIONS
    found = {it.name: it for it in decode.cases(decode.QUICK, 2)}
    llamas = ["Llama 2 x 64, bfloat16", "Llama 1 x 64, bfloat16"]
    whisper = "Whisper 64, 8 tokens, bfloat16"
    assert set(found) == {
        *llamas,
        *(f"{name}: {part}" for name in llamas for part in (*decode.PARTS, *decode.GENERATE)),
        whisper,
    }
    for name in (llamas[0], f"{llamas[0]}: products", f"{llamas[0]}: generate, top 50"):
        (result,) = measure(found[name], TINY)
        assert result.peers() == [decode.FROM_PYTHON, AS_IT_IS]
    (result,) = measure(found[whisper], TINY)
    assert result.peers() == [AS_IT_IS]


def test_parts_of_a_token():
    """Each operator counts in one part, and all parts are the whole of what was profiled."""
    local = decode.Local(lambda: torch.ones(2))
    names = {
        "foo::linear": "products",
        "aten::mm": "products",
        "foo::moe_experts": "products",
        "foo::attention": "attention",
        "aten::add": "other operators",
        decode.SECTION: "between operators",
    }
    for name, its_part in names.items():
        assert [it for it in decode.PARTS if decode.Part(local, it).has(name)] == [its_part]


def test_seconds_are_those_of_a_token():
    calls = []
    local = decode.Local(lambda: calls.append(None))
    contender = decode.PerToken(local, 8)
    assert contender.time(16, 1) < 1.0
    assert len(calls) == 2
    assert contender.time(1, 1) < 1.0
    assert len(calls) == 3

    def work():
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))

    seconds = {it: decode.Part(decode.Local(work), it).time(4, 1) for it in decode.PARTS}
    assert seconds["products"] > 0
    assert seconds["attention"] == 0
    assert seconds["between operators"] > 0
