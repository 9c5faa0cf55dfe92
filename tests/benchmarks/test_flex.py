"""Rows of flex attention compare equal computations, and each is judged beside its peer."""

import re

import matplotlib.image
import numpy as np
import pytest
import torch
from support.exact import assert_near

from benchmarks import __main__ as command
from benchmarks import flex, flex_gallery, gallery, publish, report, results_file, targets
from benchmarks.measure import Limits, Result, measure

TINY = Limits(rounds=3, turn=1e-4, contender=1e-3)
LENGTH = 256
ROWS = list(flex.rows(LENGTH, ("float32", "bfloat16")))
REACHES = {"documents": flex.document_reach, "window": flex.window_reach}

pytestmark = pytest.mark.usefixtures("one_thread")


def mask_of(row):
    """Return which keys each query sees, by the row's own mask_mod."""
    ours, _ = flex.PAIRS[row.variant](row)
    positions = torch.arange(row.length)
    mask_mod = ours.keywords["block_mask"].mask_mod
    return mask_mod(torch.zeros(()), torch.zeros(()), positions[:, None], positions)


@pytest.mark.parametrize("row", ROWS[:9], ids=lambda row: row.name)
def test_a_row_measures_both(row, monkeypatch):
    """A peer with other results would raise. Compiling PyTorch's takes too long for a test."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(flex, "torch_flex", flex.foo_ops.flex_attention)
    (case,) = [it for it in flex.cases(LENGTH, (row.dtype,)) if it.name == row.name]
    (result,) = measure(case, TINY)
    assert result.failures == {}
    assert result.peers() == [row.peer]
    assert result.least == row.least


def test_names_tell_rows_apart():
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", [it for it in ROWS[:9] if it.peer == "dense"], ids=str)
def test_blocks_that_are_left(row):
    count = row.length // flex.BLOCK
    kept = mask_of(row).view(count, flex.BLOCK, count, flex.BLOCK).any(3).any(1)
    share = int(kept.sum()) / count**2
    assert flex.blocks_left(*REACHES[row.variant](row.length)) == share
    assert row.least == flex.OF_PROPORTIONAL / share


@pytest.mark.parametrize("variant", REACHES)
def test_what_is_compared_by_its_shape_is_right(variant):
    row = next(it for it in ROWS if it.variant == variant)
    ours, _ = flex.PAIRS[variant](row)
    query, key, value = row.inputs()
    scores = (query.double() @ key.double().mT / flex.HEAD_DIM**0.5).masked_fill(
        ~mask_of(row), -torch.inf
    )
    assert_near(ours(query, key, value), scores.softmax(-1) @ value.double())


def result(foo, peer, least=0.8):
    seconds = {"foo": [foo] * 4, "is_causal": [peer] * 4}
    return Result(flex.SECTION, "causal", 1, 0.0, True, seconds, least=least)


def test_rows_are_judged_beside_their_peers():
    fast, slow = result(0.001, 0.0009), result(0.002, 0.0008)
    assert targets.peer_requirement(fast).shortfall() == ""
    assert targets.peer_requirement(slow).shortfall() == "short of 0.80 x is_causal by 50.0%"
    absent = Result(flex.SECTION, "ALiBi", 1, 0.0, True, {"foo": [0.001]}, least=2.0)
    content = results_file.Content("2026-01-01", "default", {}, [fast, slow, absent])
    header, *rows = report.table_of(content, flex.SECTION, content.results)
    assert header == ["case", "threads", "foo", "peer", "times as fast", "target", "verdict"]
    assert rows == [
        ["causal", "1", "1.00", "0.90", "0.90 (0.90-0.90)", "0.80", "reached"],
        ["causal", "1", "2.00", "0.80", "0.40 (0.40-0.40)", "0.80",
         "short of 0.80 x is_causal by 50.0%"],
        ["ALiBi", "1", "1.00", "-", "-", "2.00", "-"],
    ]  # fmt: skip


def test_a_target_is_kept_in_the_results_file(tmp_path):
    kept = [result(0.001, 0.0009, least=0.85)]
    results_file.save(tmp_path / "results.json", kept, "default")
    assert results_file.load(tmp_path / "results.json").results == kept


# ----------------------------------------------------------------------------------------- gallery

VARIANTS = {it.title: it for it in gallery.variants()}


@pytest.mark.parametrize("title", VARIANTS)
def test_pictures_of_the_manual_are_those_of_its_code(title):
    variant = VARIANTS[title]
    kept = matplotlib.image.imread(publish.IMAGES / variant.path)[..., :3]
    assert np.abs(kept - gallery.picture(variant.scores())).max() <= 1 / 255
    assert f"![{title}](images/{variant.path})" in publish.GALLERY.read_text()


def test_every_variant_of_the_gallery_is_found():
    text = publish.GALLERY.read_text().partition("## Gallery")[2].partition("\n## ")[0]
    assert list(VARIANTS) == re.findall(r"^### (.+)$", text, re.MULTILINE)


def test_hidden_pairs_are_white_and_high_scores_dark():
    scores = torch.tensor([[0.0, -torch.inf], [-2.0, -1.0]])
    pixels = gallery.picture(scores)[:: gallery.PIXELS, :: gallery.PIXELS].mean(-1)
    assert pixels[0, 1] == 1
    assert pixels[0, 0] < pixels[1, 1] < pixels[1, 0] < 1


@pytest.mark.parametrize("title", ["Prefix", "ALiBi"])
def test_variants_are_timed_with_longer_sequences(title):
    """Beside dense attention with as many batch rows, in both directions."""
    of_title = [it for it in flex_gallery.cases(LENGTH, ("float32",)) if it.name.startswith(title)]
    assert [it.name.split(", ")[1] for it in of_title] == ["forward", "backward"]
    for case in of_title:
        (result,) = measure(case, TINY)
        assert result.failures == {}
        assert result.peers() == ["dense"]


@pytest.mark.parametrize("title", VARIANTS)
def test_the_code_of_the_gallery_takes_any_length(title):
    """The share of hidden keys stays, and captured tensors cover all positions."""
    shares = []
    for length in (gallery.LENGTH, 4 * gallery.LENGTH):
        names = VARIANTS[title].run(length)
        assert names["query"].shape[1:3] == (flex_gallery.HEADS, length)
        positions = torch.arange(length)
        mask_mod = names.get("mask_mod", lambda b, h, q_idx, kv_idx: q_idx >= 0)
        seen = mask_mod(torch.tensor(0), torch.tensor(0), positions[:, None], positions)
        shares.append(float(seen.expand(length, length).double().mean()))
    # The diagonal, and the rounding at borders, have less weight in longer sequences.
    assert abs(shares[0] - shares[1]) < 0.08


def test_code_without_a_length_is_refused():
    with pytest.raises(ValueError, match="the code of Odd must set `length = 64`, once"):
        gallery.Variant("Odd", "size = 64\n").run(128)


def speed(variant, direction, foo):
    seconds = {"foo": [foo] * 3, "dense": [0.004] * 3}
    return Result(
        flex_gallery.SECTION, f"{variant}, {direction}, float32, 4 x 64, S 512, beside dense", 1,
        0.0, True, seconds,
    )  # fmt: skip


def test_speeds_stand_in_the_manual(monkeypatch, tmp_path, capsys):
    rows = [speed("Causal", "forward", 0.002), speed("Causal", "backward", 0.008)]
    results_file.save(tmp_path / "results.json", rows, "default")
    places = publish.Published(*(tmp_path / name for name in ("R", "P", "images", "gallery.md")))
    places.gallery.write_text("above<!-- figures: begin --><!-- figures: end -->below")
    command.publish_figures(tmp_path / "results.json", places, ["flex-gallery"])
    text = places.gallery.read_text()
    assert "| variant | forward, float32 | backward, float32 |" in text
    assert "| Causal | 2.00 ms (2.00) | 8.00 ms (0.50) |" in text
    assert "One thread, 4 x 64, S 512 " in text
    assert not places.readme.exists()
    assert not places.performance.exists()
    assert "gallery.md now has the figures of" in capsys.readouterr().out
    # Other tables have no page of their own.
    command.publish_figures(tmp_path / "results.json", places, [])
    assert capsys.readouterr().out.startswith("No page now has")


def test_the_manual_has_a_speed_of_each_variant():
    rows = re.findall(r"^\| ([^|]+) \|(.+)\|$", publish.GALLERY.read_text(), re.MULTILINE)
    header, _, *figures = [(name, cells.split("|")) for name, cells in rows]
    assert [name for name, _ in figures] == list(VARIANTS)
    assert [it.strip() for it in header[1]] == [
        f"{direction}, {dtype}"
        for direction in ("forward", "backward")
        for dtype in ("float32", "bfloat16")
    ]
    for _, cells in figures:
        assert all(re.fullmatch(r" [\d.]+ ms \([\d.]+\) ", it) for it in cells)
