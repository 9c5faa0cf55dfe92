"""``make test-processors`` runs the announced tests, and names those it leaves out."""

import re

import processors
import pytest
from processors import (
    PROCESSORS,
    Combination,
    Processor,
    combinations,
    llvm,
    run,
    summary,
    widths,
)


def test_every_width_and_every_way_to_multiply():
    environments = [tuple(it.environment.values()) for it in widths()]
    assert len(set(environments)) == 9
    assert {bits for bits, _, _ in environments} == {"128", "256", "512"}
    assert {(pairs, unit) for _, pairs, unit in environments} == {
        ("0", "0"),
        ("1", "0"),
        ("0", "1"),
    }


def test_code_of_a_processor_is_compiled_without_what_this_one_lacks():
    processor = Processor("other", ("avx2",), ("avxvnni", "amx-bf16"))
    combination = processor.combination({"avx2": True, "avxvnni": True})
    assert combination.name == "other without amx-bf16"
    assert combination.environment == {
        "NUMBA_CPU_NAME": "other",
        "NUMBA_CPU_FEATURES": "+avx2,+avxvnni,-amx-bf16,-prefer-256-bit",
    }


def test_processors_that_this_one_cannot_be(monkeypatch):
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    features = dict.fromkeys(("avx", "avx2", "fma", "f16c"), True)
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: features)
    found, skipped = combinations()
    assert [it.name for it in found[9:]] == ["x86-64", "haswell"]
    assert skipped[0] == (
        "skylake-avx512: skipped, this processor has no avx512f, avx512bw, avx512cd, avx512dq, "
        "avx512vl"
    )
    assert len(skipped) == 3
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    found, skipped = combinations()
    assert len(found) == 9
    assert skipped[0] == "x86-64: skipped, this processor is no x86-64"
    assert len(skipped) == len(PROCESSORS)


def test_a_combination_is_tested_and_a_failure_shown(monkeypatch):
    monkeypatch.setattr(processors, "FILES", ("tests/products/test_limbs.py",))
    passed, text = run(Combination("wide", (), {"FOO_VECTOR_BITS": "512"}, vocabulary=True))
    assert passed
    assert re.fullmatch(r"wide: 11 passed in \d+ s", text)
    passed, text = run(Combination("wrong", (), {"FOO_VECTOR_BITS": "9"}, vocabulary=True))
    assert not passed
    first, *_ = text.splitlines()
    assert re.fullmatch(r"wrong: 1 error in \d+ s \(FOO_VECTOR_BITS=9\)", first)
    assert "FOO_VECTOR_BITS must be 128, 256 or 512, got 9" in text


@pytest.mark.parametrize(
    ("returncode", "output", "expected"),
    [
        (0, "...\n3 passed, 2 deselected in 1.5s\n", "3 passed"),
        (1, "...\n1 failed, 3 passed, 1 error in 1.5s\n", "1 failed, 3 passed, 1 error"),
        (-4, "...", "ended by signal 4"),
        (5, "", "pytest returned 5"),
    ],
)
def test_summary(returncode, output, expected):
    assert summary(returncode, output) == expected
