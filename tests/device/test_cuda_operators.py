"""The manual lists PyTorch's operators for CUDA alone, and which of them foo has."""

import torch
from support.cuda_operators import PAGE, operators, page


def test_the_page_is_up_to_date():
    """`python tests/support/cuda_operators.py` writes the page, for one version of PyTorch."""
    written = PAGE.read_text()
    version = ".".join(torch.__version__.split(".")[:2])
    if f"PyTorch {version} " in written:
        assert written == page()


def test_refused_operators_have_something_instead():
    """Also operators of a PyTorch that is newer than the page."""
    assert [it.name for it in operators() if it.status() == "refused" and not it.instead()] == []
