"""Draw random numbers on both devices from the same seed."""

import torch


def drawn_on_both(draw):
    """Draw twice on the CPU and on foo, where the CPU's generator must not move."""
    torch.manual_seed(5)
    expected = draw("cpu"), draw("cpu")
    torch.manual_seed(5)
    cpu_state = torch.get_rng_state()
    actual = draw("foo"), draw("foo")
    assert not torch.equal(*expected)
    assert torch.equal(torch.get_rng_state(), cpu_state)
    return expected, actual
