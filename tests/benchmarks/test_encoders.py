"""The table of encoders: its texts, and its target relative to the best peer."""

import torch

from benchmarks import encoders, report
from benchmarks.measure import Result
from benchmarks.results_file import Content


def test_most_texts_are_short():
    size = encoders.DEFAULT
    lengths = size.lengths()
    assert (len(lengths), int(lengths.min()), int(lengths.max())) == (64, 5, 96)
    assert 0.35 < lengths.float().mean() / size.longest < 0.45
    inputs = encoders.QUICK.inputs()
    assert inputs["attention_mask"].sum(1).equal(encoders.QUICK.lengths())
    assert inputs["input_ids"].ne(0).equal(inputs["attention_mask"].bool())


def test_contenders_agree():
    makers = encoders.contenders(encoders.QUICK, "float32", 1)
    makers.pop(encoders.ONNX_RUNTIME)  # not installed for tests
    results = [make().results()[0] for make in makers.values()]
    assert results[0].shape == (4, 64)
    torch.testing.assert_close(*results)


def row(name, foo, **peers):
    seconds = {"foo": [foo] * 4, **{peer: [it] * 4 for peer, it in peers.items()}}
    return Result(encoders.SECTION, name, 2, 1000.0, True, seconds, least=encoders.LEAST)


def test_the_target_is_relative_to_the_best_peer():
    results = [
        row("fast", 0.001, torch=0.004, onnx=0.002),
        row("slow", 0.001, torch=0.004, onnx=0.0012),
        row("alone", 0.001),
    ]
    content = Content("2026-01-01", "default", {}, results)
    _, *rows = report.table_of(content, encoders.SECTION, results)
    assert [it[-2] for it in rows] == ["1.50"] * 3
    assert [it[-1] for it in rows] == ["reached", "short of 1.50 x onnx by 20.0%", report.NONE]
