"""The manual lists what PyTorch has for CUDA alone, and what foo has of it."""

import torch
from support.cuda_operators import PAGE, operators, page


def test_the_page_is_up_to_date():
    """It is written by `python tests/support/cuda_operators.py`, for one version of PyTorch."""
    written = PAGE.read_text()
    version = ".".join(torch.__version__.split(".")[:2])
    if f"PyTorch {version} " in written:
        assert written == page()


def test_refused_operators_have_something_instead():
    """Also those of a PyTorch that is newer than the page."""
    assert [it.name for it in operators() if it.status() == "refused" and not it.instead()] == []
