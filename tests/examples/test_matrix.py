"""Every operator of examples/operators passes every check, on cpu and on foo."""

import dataclasses
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "operators"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
SPECS = [importlib.import_module(f"examples.operators.{name}").SPEC for name in NAMES]
# Most of the time goes into compiling their kernels, once per dtype.
IN_ONE_DTYPE = [dataclasses.replace(spec, dtypes=spec.dtypes[:1]) for spec in SPECS]


@pytest.mark.operators(*IN_ONE_DTYPE, checks=["values", "gradients", "opcheck"], quick=True)
def test_values_and_gradients(operator_check):
    operator_check()


@pytest.mark.whole
@pytest.mark.operators(*SPECS)
def test_operator(operator_check):
    operator_check()
