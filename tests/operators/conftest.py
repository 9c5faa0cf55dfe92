"""Fixtures that tests of operators share."""

import contextlib

import pytest
from torch._subclasses import FakeTensorMode


@pytest.fixture(params=["eager", "fake"])
def mode(request):
    """Run both the operators and their fake kernels."""
    return FakeTensorMode() if request.param == "fake" else contextlib.nullcontext()
