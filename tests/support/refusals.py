"""Check errors word for word."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode


def assert_refused(
    function: Callable[..., Any], kind: type[Exception], message: str, given: dict[str, Any]
) -> None:
    """Check that a call and one with fake tensors raise an error with this message."""
    exactly = rf"\A{re.escape(message)}\Z"
    with pytest.raises(kind, match=exactly):
        function(**given)
    with FakeTensorMode() as mode:
        fakes = {
            name: mode.from_tensor(it) if isinstance(it, torch.Tensor) else it
            for name, it in given.items()
        }
        with pytest.raises(kind, match=exactly):
            function(**fakes)
