"""``python -m foo_ops.tune`` makes a table of PyTorch's products for processors without one."""

import json

import pytest
import torch
from support.processes import python

from foo_ops import _C, tune
from foo_ops.tune import ANY, Products

TABLE = [
    Products(torch.float32, "forward", 16, 63),
    Products(torch.bfloat16, "grad_weight", 128, ANY),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Keep tables in an empty folder, and use none afterwards."""
    monkeypatch.setenv("FOO_CACHE_DIR", str(tmp_path))
    before = _C.torch_products()
    yield tmp_path
    _C.set_tuned_products([])
    _C.set_torch_products(before)


def is_pytorchs(dtype, form, rows):
    return _C.is_quicker_by_torch("tuned", dtype, form, rows=rows, work=float(1 << 30))


def test_a_kept_table_decides(folder):
    assert not tune.load()
    path = tune.save(TABLE)
    assert path.parent == folder
    assert tune.load()
    of_rows = [is_pytorchs(torch.float32, "forward", rows) for rows in (15, 16, 63, 64)]
    assert of_rows == [False, True, True, False]
    assert not is_pytorchs(torch.float32, "bias", 16)
    assert not is_pytorchs(torch.float64, "forward", 16)
    assert is_pytorchs(torch.bfloat16, "grad_weight", 128)


def test_other_processors_do_not_use_it(folder):
    tune.save(TABLE)
    assert tune.load()
    of_families = {
        family: _C.is_quicker_by_torch(family, torch.float32, "forward", rows=16, work=1e9)
        for family in ("none", "amd-bfloat16", "tuned")
    }
    assert of_families == {"none": False, "amd-bfloat16": False, "tuned": True}


@pytest.mark.parametrize("fact", ["processor", "target", "torch", "foo_ops"])
def test_a_table_of_another_machine_is_left(folder, fact):
    path = tune.save(TABLE)
    content = json.loads(path.read_text())
    content["machine"][fact] = "another"
    path.write_text(json.dumps(content))
    assert not tune.load()


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"machine": 1, "products": '])
def test_a_broken_file_is_left_with_a_warning(folder, text):
    (folder / tune.FILE).write_text(text)
    with pytest.warns(UserWarning, match=f"{tune.FILE} is not used: "):
        assert not tune.load()


def test_unknown_forms_are_left_with_a_warning(folder):
    tune.save([Products(torch.float32, "sideways", 16, 63)])
    with pytest.warns(UserWarning, match="is not used: ValueError: must be one of forward, bias"):
        assert not tune.load()


def test_stretches_reach_to_the_next_measured_number():
    assert tune.stretches([9, 16, 128]) == [(9, 31), (128, 255)]
    assert tune.stretches([512, 1024]) == [(512, ANY)]
    assert tune.stretches([]) == []


def test_a_product_is_pytorchs_where_it_is_quicker_on_all_numbers_of_threads():
    speeds = {
        (dtype, form, rows, threads): 1.0
        for dtype in tune.DTYPES
        for form in tune.FORMS
        for rows in tune.ROWS
        for threads in (1, 4)
    }
    assert tune.table_of(speeds) == []
    for rows in (64, 128):
        speeds[torch.float32, "bias", rows, 1] = speeds[torch.float32, "bias", rows, 4] = 1.2
    speeds[torch.bfloat16, "bias", 1024, 1] = 1.1
    speeds[torch.bfloat16, "forward", 9, 4] = 1.1
    assert tune.table_of(speeds) == [
        Products(torch.float32, it, 64, 255) for it in ("bias", "activation", "gate")
    ]


def test_speeds_are_of_pytorchs_products_and_ours(folder, monkeypatch):
    """Each form reaches the table's rule of its name, and is timed with both ways."""
    families, forms = [], []
    monkeypatch.setattr(tune, "ROUNDS", 1)
    monkeypatch.setattr(tune, "SECONDS", 0.0)
    choose = _C.set_torch_products
    monkeypatch.setattr(
        _C, "set_torch_products", lambda name: families.append(name) or choose(name)
    )
    for form in tune.FORMS:
        _C.set_tuned_products([Products(torch.float32, form, 0, ANY)])
        with torch.profiler.profile() as profile:
            tune.relative_speed(torch.float32, form, 64, 256, 512)
        if any(it.name == "foo::linear by aten::mm" for it in profile.events()):
            forms.append(form)
    assert {"none", "tuned"} <= set(families)
    if torch.backends.mkl.is_available():
        assert forms == list(tune.FORMS)


SMALL = """
from foo_ops import tune
tune.LAYERS, tune.ROWS, tune.ROUNDS, tune.SECONDS = ((256, 512),), (16, 64), 1, 0.0
tune.main()
"""
FAMILY = "import torch; torch.ops.foo.linear; from foo_ops import _C; print(_C.torch_products())"


def test_the_command_keeps_a_table_for_later_processes(tmp_path):
    process = python(SMALL, FOO_CACHE_DIR=str(tmp_path), FOO_TORCH_PRODUCTS="tuned")
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    assert lines[0] == "PyTorch's speed relative to ours:"
    assert lines[1].startswith("float32 forward, 1 thread, rows  16: ")
    assert lines[-1].endswith(f"{tmp_path / tune.FILE}: processes that start from now on use it")
    assert json.loads((tmp_path / tune.FILE).read_text())["machine"] == tune.machine()
    # It is not used where the variable asks for none.
    for chosen in ("tuned", "none"):
        process = python(FAMILY, FOO_CACHE_DIR=str(tmp_path), FOO_TORCH_PRODUCTS=chosen)
        assert process.stdout.strip() == chosen


@pytest.mark.parametrize("has_table", [False, True])
def test_a_processor_without_a_table_uses_the_kept_one(folder, monkeypatch, has_table):
    monkeypatch.setattr(_C, "has_no_products_of_torch", lambda: True)
    _C.set_torch_products("none")
    if has_table:
        tune.save(TABLE)
    tune.use_kept_table()
    assert _C.torch_products() == ("tuned" if has_table else "none")


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.setattr(tune, "cache_directory", lambda: None)
    assert not tune.load()
    with pytest.raises(OSError, match="there is no folder for compiled kernels: set FOO_CACHE_DIR"):
        tune.save(TABLE)
