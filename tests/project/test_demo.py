"""The demo prints and writes figures that are right, and refuses unsupported options."""

import dataclasses
import io
import os
import re
from functools import partial

import pytest
import torch
from matplotlib.image import imread
from rich.console import Console
from support.parts import whole
from support.processes import module, python

from foo_ops.demo import __main__ as demo
from foo_ops.demo import report
from foo_ops.demo.model import GPT, OPERATORS, GPTConfig, rotary_table
from foo_ops.demo.training import (
    Corpus,
    Point,
    Setup,
    Trainer,
    compare_speed,
    generate,
    learning_rate_share,
    train,
    validation_steps,
    windows,
)

SETUPS = [
    Setup(device, operators, compiled=False)
    for device in ("cpu", "foo")
    for operators in ("foo", "torch")
]
ROUNDING = 1e-5
"""Relative error of float32 losses after a few steps."""
SMALL = GPTConfig(layers=1, width=32, heads=2, inner=88, context=64)
FLEX = dataclasses.replace(SMALL, attention="flex")


@pytest.fixture(scope="module")
def corpus():
    return Corpus.load()


@pytest.fixture
def small(monkeypatch):
    """Make the demo take a second: a smaller model, sample and comparison."""
    monkeypatch.setattr(demo, "GPTConfig", partial(dataclasses.replace, SMALL))
    monkeypatch.setattr(demo, "SAMPLE_BYTES", 20)
    monkeypatch.setattr(demo, "COMPARISON_ROUNDS", 2)


def exact_losses(corpus, **options):
    """Compute the losses with PyTorch's operators in float64."""
    setup = Setup("cpu", "torch", compiled=False)
    return losses(corpus, setup, **options, dtype=torch.float64)


def losses(corpus, setup, *, seed, steps=6, config=SMALL, dtype=torch.float32):
    torch.manual_seed(seed)
    model = GPT(config, OPERATORS[setup.operators]).to(dtype)
    trainer = Trainer(model, setup, steps=steps)
    return [point.loss for point in train(trainer, corpus, steps=steps, seed=seed)]


# The whole demo in a separate process, as a log shows it.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "not" / "there yet"
    process = python(module("foo_ops.demo"), "--steps", 20, "--output", folder)
    assert process.returncode == 0, process.stderr
    return process.stdout, folder


def test_log_has_a_readable_line_for_each_validation(finished):
    output, _ = finished
    assert "\x1b" not in output
    assert "\r" not in output
    lines = re.findall(
        r"^step +(\d+)/20  loss \d\.\d{3}  validation \d\.\d{3}  ([\d,]+|-) tokens/s$", output, re.M
    )
    assert [int(step) for step, _ in lines] == list(range(1, 21))
    assert [speed == "-" for _, speed in lines] == [True] + 19 * [False]


def test_loss_falls(finished):
    output, _ = finished
    validation = [float(loss) for loss in re.findall(r"validation (\d\.\d+)", output)]
    assert validation[-1] < validation[0] - 1
    assert validation[-1] < 3.4


def test_checkpoint_loads_as_plain_data_and_its_loss_is_the_same(finished):
    output, folder = finished
    path = folder / "checkpoint.pt"
    trained, reloaded = re.search(
        rf"Checkpoint: {path}, loss on foo (\S+), reloaded on cpu (\S+)", output
    ).groups()
    assert float(trained) == pytest.approx(float(reloaded), rel=1e-5)
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    assert checkpoint["config"] == {
        "layers": 4,
        "width": 128,
        "heads": 4,
        "inner": 352,
        "context": 256,
        "attention": "causal",
    }
    assert {tensor.device.type for tensor in checkpoint["weights"].values()} == {"cpu"}


def test_checkpoint_holds_the_last_validation_loss(finished):
    output, _ = finished
    last = re.findall(r"validation (\d\.\d+)", output)[-1]
    trained = re.search(r"loss on foo (\S+),", output)[1]
    assert float(trained) == pytest.approx(float(last), abs=1e-3)


def test_loss_curve_is_a_picture_of_two_curves(finished):
    _, folder = finished
    picture = imread(folder / "loss.png")
    assert picture.shape[:2] == (675, 1200)
    for colour in (report.TRAIN_COLOUR, report.VALIDATION_COLOUR):
        rgb = torch.tensor([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
        near = (torch.from_numpy(picture[..., :3]) - rgb).abs().amax(-1) < 0.02
        assert near.sum() > 500


def test_sample_is_framed_and_starts_with_the_prompt(finished):
    output, _ = finished
    assert re.search(r'─ generated ─.*\n│ The "foo" statement +│\n│ \*{19} +│\n', output)


def test_speed_is_compared_with_the_cpu(finished):
    output, _ = finished
    ours, theirs, ratio = re.search(
        r"Speed: ([\d,]+) tokens/s with torch\.ops\.foo on foo,\s+([\d,]+)\s+with\s+"
        r"PyTorch's\s+operators\s+on\s+cpu:\s+([\d.]+)\s+times\s+as\s+fast\.",
        output,
    ).groups()
    ours, theirs = int(ours.replace(",", "")), int(theirs.replace(",", ""))
    assert float(ratio) == pytest.approx(ours / theirs, abs=0.01)


# Options.


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_every_device_trains_with_all_operators(setup, small, tmp_path, capsys):
    device, operators = setup.device, setup.operators
    demo.main(
        ["--device", device, "--operators", operators, "--steps", "2", "--output", str(tmp_path)]
    )
    output = capsys.readouterr().out
    assert f"{setup}, {torch.get_num_threads()} threads." in re.sub(r"\s+", " ", output)
    # The baseline is not compared with itself.
    assert ("Speed:" in output) == (setup != setup.baseline())


@pytest.mark.parametrize("device", ["foo", *whole("cpu")])
def test_compiled_training_gives_the_same_losses(device, corpus):
    compiled = Setup(device, "foo", compiled=True)
    assert str(compiled) == f"torch.ops.foo on {device}, compiled"
    expected = exact_losses(corpus, seed=0, steps=3)
    assert losses(corpus, compiled, seed=0, steps=3) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.whole
def test_compile_option_compiles(small, tmp_path, capsys):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    demo.main(["--compile", "--steps", "2", "--output", str(tmp_path)])
    assert "torch.ops.foo on foo, compiled" in capsys.readouterr().out
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


@pytest.mark.parametrize("setup", [*whole(*SETUPS[:2]), SETUPS[2], *whole(SETUPS[3])], ids=str)
def test_a_seed_fixes_the_losses(setup, corpus):
    first = losses(corpus, setup, seed=3, steps=3, config=GPTConfig())
    assert losses(corpus, setup, seed=3, steps=3, config=GPTConfig()) == first
    assert losses(corpus, setup, seed=4, steps=1, config=GPTConfig())[0] != first[0]


def test_devices_agree_on_the_losses(corpus):
    expected = exact_losses(corpus, seed=0)
    for setup in SETUPS:
        assert losses(corpus, setup, seed=0) == pytest.approx(expected, rel=ROUNDING)


@pytest.mark.parametrize("setup", SETUPS, ids=str)
def test_a_score_mod_trains(setup, corpus):
    """The captured slopes of a score_mod are learned as in dense float64 attention."""
    expected = exact_losses(corpus, seed=0, config=FLEX)
    assert losses(corpus, setup, seed=0, config=FLEX) == pytest.approx(expected, rel=ROUNDING)


def test_slopes_change_and_are_kept(small, tmp_path, capsys):
    demo.main(["--attention", "flex", "--steps", "2", "--output", str(tmp_path)])
    assert "documentation, and slopes of ALiBi: torch.ops.foo on foo" in re.sub(
        r"\s+", " ", capsys.readouterr().out
    )
    model = GPT.load(tmp_path / "checkpoint.pt", OPERATORS["torch"])
    slopes = model.blocks[0].slopes.detach()
    difference = (slopes - torch.tensor([2.0**-4, 2.0**-8])).abs()
    assert 1e-4 < difference.min() < difference.max() < 1e-2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got 0"),
        (["--steps", "ten"], "argument --steps: must be a whole number of at least 1, got ten"),
        (["--seed", "-1"], "argument --seed: must be a whole number from 0 to 2**63 - 1, got -1"),
        (["--output", __file__], f"--output: must be a folder, got {__file__} (File exists)"),
        (["--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        (["--operators", "flash"], "argument --operators: invalid choice: 'flash'"),
        (["--attention", "no"], "argument --attention: invalid choice: 'no'"),
        (["--step", "3"], "unrecognized arguments: --step 3"),
    ],
    ids=lambda value: value[0] + value[1][:5] if isinstance(value, list) else "",
)
def test_a_bad_option_is_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        demo.parse_options(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_takes_no_file_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(SystemExit):
        demo.parse_options(["--output", str(tmp_path)])
    message = f"argument --output: must be a writable folder, got {tmp_path}\n"
    assert message in capsys.readouterr().err


def test_missing_extras_are_named():
    program = (
        "import runpy, sys; sys.modules.update(rich=None, matplotlib=None); "
        "sys.argv[1:] = ['--steps', '1', '--output', '.']; "
        "runpy.run_module('foo_ops.demo', run_name='__main__')"
    )
    process = python(program)
    assert process.returncode == 1
    assert process.stderr == "foo_ops.demo needs matplotlib and rich: pip install foo_ops[demo]\n"


# Parts of the demo.


def test_reload_fails_loudly_when_the_weights_differ(corpus, tmp_path):
    model = GPT(SMALL, OPERATORS["torch"])
    model.save(tmp_path / "checkpoint.pt")
    with torch.no_grad():
        model.embedding.weight.mul_(1.001)
    batch = corpus.validation_batch(2, SMALL.context)
    setup = Setup("cpu", "torch", compiled=False)
    with pytest.raises(SystemExit, match="The checkpoint does not hold the model that was trained"):
        demo.compare_reloaded(model, setup, tmp_path / "checkpoint.pt", batch)


def test_nothing_held_out_is_trained_on(corpus):
    train_text, held_out = (bytes(part.tolist()) for part in (corpus.train, corpus.validation))
    assert len(held_out) == pytest.approx(0.1 * (len(train_text) + len(held_out)), abs=1)
    trained = set(train_text.split(b"\n\n"))
    # The first paragraph of the held-out part may be the end of one that was split.
    assert not [part for part in held_out.split(b"\n\n")[1:] if part in trained]


def test_targets_are_the_next_bytes():
    inputs, targets = windows(torch.arange(100, dtype=torch.uint8), torch.tensor([0, 90]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [90, 91, 92, 93, 94]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [91, 92, 93, 94, 95]]


def test_validation_reaches_the_last_byte(corpus):
    _, targets = corpus.validation_batch(4, 64)
    assert torch.equal(targets[-1], corpus.validation[-64:].long())


@pytest.mark.parametrize("config", [SMALL, FLEX], ids=["causal", "flex"])
def test_model_does_not_look_ahead(config):
    torch.manual_seed(0)
    model = GPT(config, OPERATORS["foo"])
    tokens = torch.randint(256, (1, 32))
    changed = tokens.clone()
    changed[0, 20] += 1
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert difference[:20].max() == 0
    assert difference[20:].min() > 0


@pytest.mark.parametrize("name", OPERATORS)
def test_rotation_depends_on_distance_only(name):
    torch.manual_seed(0)
    rotate = OPERATORS[name].rotary_embedding
    query, key = torch.randn(2, 16).double()
    cosine, sine = rotary_table(64, 16).double()
    turned = [rotate(x.expand(1, 64, 1, 1, 16), cosine, sine)[0, :, 0, 0] for x in (query, key)]
    scores = turned[0] @ turned[1].T
    torch.testing.assert_close(scores[3:, 3:], scores[:-3, :-3], rtol=1e-5, atol=1e-5)
    assert scores[0].std() > 0.1


@pytest.mark.parametrize("steps", [1, 2, 20, 2000])
def test_learning_rate_warms_up_and_decays(steps):
    shares = [learning_rate_share(step, steps) for step in range(steps)]
    peak = shares.index(max(shares))
    assert max(shares) == 1
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert min(shares) > 0


@pytest.mark.parametrize("steps", [1, 7, 20, 1999])
def test_first_and_last_step_are_validated(steps):
    validated = validation_steps(steps)
    assert {1, steps} <= validated <= set(range(1, steps + 1))
    assert len(validated) <= 21


def test_speed_is_the_median_of_the_counted_rounds():
    class Recorder:
        def __init__(self, durations):
            self.durations = iter(durations)

        def timed_step(self, batch):
            return 0.0, next(self.durations)

    batch = (torch.zeros(2, 50), torch.zeros(2, 50))
    trainers = [Recorder([9, 1, 2, 100]), Recorder([9, 4, 4, 4])]
    assert compare_speed(trainers, batch, 3) == [50, 25]


def test_sample_follows_the_seed():
    torch.manual_seed(0)
    model = GPT(SMALL, OPERATORS["torch"])
    first = generate(model, "cpu", b"prompt", 80, seed=1)
    assert len(first) == 80
    assert generate(model, "cpu", b"prompt", 80, seed=1) == first
    assert generate(model, "cpu", b"prompt", 80, seed=2) != first


def test_sample_cannot_steer_the_terminal():
    assert report.printable(b"a\x1b[31m\r\xff\n\xe2\x82\xac") == "a·[31m·\ufffd\n€"


def test_terminal_sees_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=100)
    points = [Point(1, 2.5, None, 2.25), Point(2, 1.5, 12345.6, None)]
    assert report.follow(console, points, 2) == points
    last = console.file.getvalue().split("\r")[-1]
    assert "step 2/2" in last
    assert "loss 1.500  validation 2.250  12,346 tokens/s" in last
