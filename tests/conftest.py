"""What every test module may ask for."""

import pytest
import torch


@pytest.fixture(params=["cpu", "foo"])
def device(request):
    return request.param


@pytest.fixture
def fresh_compiler():
    """Nothing that another test compiled, and nothing left for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def restore_threads():
    """Lets a test set the number of threads."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
